"""The text of a compiled program (XLA's optimized HLO) as computations and instructions."""

import math
import re
from dataclasses import dataclass, field

_BITS = {"pred": 8, "token": 0}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([^\s=]+) = (.*)$")
_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_HEAD = re.compile(r"^(ENTRY )?%?([^\s(]+) .*\{$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Shape:
    """One array of the text: bits of a number, sizes, and whether it lies in a chip's own fast memory."""

    bits: int
    sizes: tuple[int, ...]
    on_chip: bool = False

    @property
    def bytes(self) -> int:
        """Bytes, without the layout's padding."""
        return math.prod(self.sizes) * self.bits // 8


def read_shapes(text: str) -> tuple[Shape, ...]:
    """The arrays of a shape, a tuple's one after the other."""
    return tuple(
        Shape(_bits(kind), tuple(int(size) for size in sizes.split(",") if size), "S(1)" in (layout or ""))
        for kind, sizes, layout in _SHAPE.findall(re.sub(r"/\*.*?\*/", "", text))
    )


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    found = re.match(r"[a-z]+(\d+)", kind)  # bf16, f8e4m3fn, f4e2m1fn, s32, u8, c64
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. `attributes` is what follows the operands."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays it makes."""
        return read_shapes(self.shape)


@dataclass
class Computation:
    """A named list of instructions."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def operand_shapes(self, instruction: Instruction) -> list[tuple[Shape, ...]]:
        """The arrays of each operand."""
        made = (self.instructions.get(name) for name in instruction.operands)
        return [() if one is None else one.shapes for one in made]


def tuple_parts(shape: str) -> list[str]:
    """The top-level entries of a tuple shape; the shape itself where it is no tuple."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, start = [], 0, 1
    for place, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 1:
            parts.append(shape[start:place])
            start = place + 1
    return [*parts, shape[start:-1]]


def attribute(one: Instruction, key: str) -> str:
    """The name of the computation that an instruction gives under `key`; empty where it gives none."""
    found = re.search(rf"\b{key}=%?([\w.\-]+)", one.attributes)
    return found[1] if found else ""


def called_by(one: Instruction) -> list[str]:
    """Computations that an instruction runs."""
    if "=" not in one.attributes or one.opcode in ("async-update", "async-done"):
        return []
    names = _CALLED.findall(one.attributes)
    for branches in _BRANCHES.findall(one.attributes):
        names += [name.strip().lstrip("%") for name in branches.split(",")]
    return names


def read_program(text: str) -> tuple[dict[str, Computation], str, list[str]]:
    """All computations by name, the entry's name, and the lines that stand above them (tables of source places)."""
    computations: dict[str, Computation] = {}
    entry, tables = "", []
    current: Computation | None = None
    for line in text.splitlines():
        if current is None:
            head = _HEAD.match(line)
            if head is None or line.startswith("HloModule"):
                tables.append(line)
                continue
            current = computations[head[2]] = Computation(head[2])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif (one := _instruction(line)) is not None:
            current.instructions[one.name] = one
    if not entry:
        raise ValueError("this is no HLO text: it has no ENTRY computation")
    return computations, entry, tables


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    rest = found[2]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    inner = rest[opcode.end() : close]
    names = tuple(re.findall(r"%([\w.\-]+)", inner)) or tuple(x.strip() for x in inner.split(",") if x.strip())
    return Instruction(found[1], opcode[1], rest[:end], names, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
    """Place of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return start + found.start()
    raise ValueError(f"unbalanced parentheses: {text[start : start + 80]}")


def frame_functions(lines: list[str]) -> dict[int, str]:
    """The innermost function of each stack frame, from the tables above the computations."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] = {}
    for line in lines:
        if re.fullmatch(r"[A-Z]\w+", line):
            table = tables.setdefault(line, {})
        elif (found := re.match(r"(\d+) (.*)", line)) is not None:
            table[int(found[1])] = found[2]
    functions: dict[int, str] = {}
    for frame, entry in tables.get("StackFrames", {}).items():
        place = re.search(r"file_location_id=(\d+)", entry)
        location = tables.get("FileLocations", {}).get(int(place[1]), "") if place else ""
        name = re.search(r"function_name_id=(\d+)", location)
        functions[frame] = tables.get("FunctionNames", {}).get(int(name[1]), "?").strip('"') if name else "?"
    return functions
