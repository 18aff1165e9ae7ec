"""What a compiled program's text tells: its loops, the bytes of its collectives, the work inside loop bodies.

XLA's own cost analysis counts a loop's body once. `Program.loops` finds each loop, how often it runs where the compiler
knows, and the function that it came from; `Program.times` is how often each computation runs, and
everything is counted so often.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip

_BITS = {"pred": 8, "token": 0}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([^\s=]+) = (.*)$")
_OPCODE = re.compile(r"\s([a-z][\w\-]*)\(")
_HEAD = re.compile(r"^(ENTRY )?%?([^\s(]+) .*\{$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_NO_TRAFFIC = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota"}


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


@dataclass(frozen=True)
class Loop:
    """A `while` of `computation`.

    - `function`: the Python function that wrote it.
    - `rounds`: how often its body runs; `source` says whether that is "known" to the compiler, "assumed", or
        "unknown": counted once.
    """

    computation: str
    body: str
    condition: str
    function: str
    rounds: float
    source: Literal["known", "assumed", "unknown"]


class Program:
    """The optimized HLO of one device, read from its text.

    **Arguments:**

    - `text`: as `Compiled.as_text()` gives it or XLA dumps it after optimization.
    - `assumed`: rounds by function name, of loops whose number only the data tell.
    """

    def __init__(self, text: str, assumed: Mapping[str, float | int] | None = None) -> None:
        self.computations, self.entry, tables = _read(text)
        functions = _frame_functions(tables)
        self.loops = [
            _loop(computation.name, one, functions, assumed or {})
            for computation, one in self._instructions(every=True)
            if one.opcode == "while"
        ]

    @cached_property
    def times(self) -> dict[str, float]:
        """How often each computation runs in one call of the program; both branches of a choice count."""
        bodies = {(loop.computation, name): loop for loop in self.loops for name in (loop.body, loop.condition)}
        times: dict[str, float] = defaultdict(float)

        def visit(name: str, count: float) -> None:
            times[name] += count
            for one in self.computations[name].instructions.values():
                for called in _called(one):
                    loop = bodies.get((name, called))
                    if called in self.computations:
                        visit(called, count if loop is None else count * loop.rounds)

        visit(self.entry, 1.0)
        return times

    def collectives(self) -> dict[str, tuple[float, float]]:
        """Operations and bytes a device by kind: of each the larger of what goes in and what comes out."""
        found: dict[str, tuple[float, float]] = {}
        for computation, one in self._instructions():
            kind = one.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                outs = [sum(s.bytes for s in read_shapes(part)) for part in _parts(one.shape)]
                # A start's result holds operands and results side by side: ((in…), (out…), …).
                out = max(outs) if one.opcode.endswith("-start") and len(outs) > 1 else sum(outs)
                into = sum(s.bytes for operand in computation.operand_shapes(one) for s in operand)
                count, size = found.get(kind, (0.0, 0.0))
                times = self.times[computation.name]
                found[kind] = (count + times, size + times * max(into, out))
        return {kind: found[kind] for kind in COLLECTIVES if kind in found}

    def product_flops(self) -> float:
        """FLOPs of the matrix products, every round counted."""
        return sum(self.times[where.name] * product_flops(where, one) for where, one in self._instructions())

    def traffic(self) -> float:
        """Bytes read from and written to a device's memory, every round counted; of what is sliced only the slice."""
        return sum(
            self.times[computation.name] * self._traffic(computation, one)
            for computation, one in self._instructions()
            if computation.name not in self._fused
        )

    @cached_property
    def _fused(self) -> set[str]:
        """Computations whose values never leave the chip: insides of fusions, and reducers."""
        inside: set[str] = set()
        for _, one in self._instructions(every=True):
            if one.opcode == "fusion" or ("to_apply=" in one.attributes and one.opcode != "call"):
                inside.update(_called(one))
        return inside

    def _instructions(self, every: bool = False) -> Iterator[tuple[Computation, Instruction]]:
        for name, computation in self.computations.items():
            if every or self.times[name]:
                for one in computation.instructions.values():
                    yield computation, one

    def _traffic(self, computation: Computation, one: Instruction) -> int:
        """Bytes that an instruction reads from and writes to HBM; of what it slices only the slice."""
        if one.opcode in _NO_TRAFFIC or one.opcode.endswith("-done"):
            return 0
        if one.opcode.endswith("-start"):  # the result holds what is made and what was read, side by side
            return sum(_hbm(read_shapes(part)) for part in _parts(one.shape)[:2])
        out, operands = _hbm(one.shapes), computation.operand_shapes(one)
        if one.opcode in ("dynamic-slice", "gather", "slice"):
            return 2 * out
        if one.opcode == "dynamic-update-slice":
            return 2 * _hbm(operands[1])
        if one.opcode != "fusion":
            return out + sum(map(_hbm, operands))
        inner = self.computations[_attribute(one, "calls")]
        read = 0
        for number, shapes in enumerate(operands):
            slices, size = self._sliced(inner, number), _hbm(shapes)
            read += size if slices is None else min(size, slices)
        written = 0
        for made in _roots(inner):
            if made.opcode == "dynamic-update-slice":
                written += sum(s.bytes for s in inner.operand_shapes(made)[1])
            else:
                written += _hbm(made.shapes)
        return read + min(out, written)

    def _sliced(self, inner: Computation, number: int) -> int | None:
        """Bytes that a fusion takes of its operand `number` where it only slices it or overwrites a slice."""
        wanted = (str(number),)
        given = [x.name for x in inner.instructions.values() if x.opcode == "parameter" and x.operands == wanted]
        total = 0
        for name in given:  # grows while the same values go by other names
            for user in inner.instructions.values():
                if name not in user.operands:
                    continue
                place: int | None = 0
                if user.opcode in ("bitcast", "copy", "reshape", "transpose"):
                    given.append(user.name)
                elif user.opcode in ("dynamic-slice", "gather", "slice") and user.operands[0] == name:
                    place = sum(s.bytes for s in user.shapes)
                elif user.opcode == "fusion":
                    called = self.computations[_attribute(user, "calls")]
                    place = self._sliced(called, user.operands.index(name))
                elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
                    return None
                if place is None:
                    return None
                total += place
        return total


def product_flops(computation: Computation, one: Instruction) -> int:
    """FLOPs of a `dot` or a `convolution` (a TPU's form of every matrix product), 0 of anything else."""
    gemm = one.opcode == "custom-call" and "__cublas" in one.attributes
    if one.opcode not in ("dot", "convolution") and not gemm:
        return 0
    left, right = (shapes[0].sizes for shapes in computation.operand_shapes(one)[:2])
    out = one.shapes[0].sizes
    if one.opcode != "convolution":
        contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', one.attributes)
        axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])] if contracted else []
        return 2 * math.prod(out) * math.prod(left[axis] for axis in axes)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    assert labels is not None
    lhs, rhs, result = labels[1], labels[2], labels[3]
    pairs = 1
    for axis in sorted(label for label in lhs if label.isdigit()):
        sizes = left[lhs.index(axis)], right[rhs.index(axis)], out[result.index(axis)]
        pairs *= _window_pairs(one.attributes, int(axis), *sizes)
    return 2 * out[result.index("b")] * out[result.index("f")] * right[rhs.index("i")] * pairs


def _window_pairs(attributes: str, axis: int, size: int, kernel: int, out: int) -> int:
    """Pairs of output and kernel places that meet a real input place along one window axis."""

    def entry(key: str, default: str) -> str:
        found = re.search(rf"window=\{{[^}}]*\b{key}=([^\s}}]+)", attributes)
        return found[1].split("x")[axis] if found else default

    stride, low = int(entry("stride", "1")), int(entry("pad", "0_0").split("_")[0])
    spread, step = int(entry("lhs_dilate", "1")), int(entry("rhs_dilate", "1"))
    places = (o * stride - low + k * step for o in range(out) for k in range(kernel))
    return sum(0 <= place <= (size - 1) * spread and place % spread == 0 for place in places)


def _hbm(shapes: tuple[Shape, ...]) -> int:
    return sum(s.bytes for s in shapes if not s.on_chip)


def _roots(inner: Computation) -> list[Instruction]:
    root = list(inner.instructions.values())[-1]
    if root.opcode == "tuple":
        return [inner.instructions[name] for name in root.operands if name in inner.instructions]
    return [root]


def _parts(shape: str) -> list[str]:
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


def _attribute(one: Instruction, key: str) -> str:
    found = re.search(rf"\b{key}=%?([\w.\-]+)", one.attributes)
    return found[1] if found else ""


def _called(one: Instruction) -> list[str]:
    if "=" not in one.attributes or one.opcode in ("async-update", "async-done"):
        return []
    names = _CALLED.findall(one.attributes)
    for branches in _BRANCHES.findall(one.attributes):
        names += [name.strip().lstrip("%") for name in branches.split(",")]
    return names


def _read(text: str) -> tuple[dict[str, Computation], str, list[str]]:
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


def _loop(computation: str, one: Instruction, functions: Mapping[int, str], assumed: Mapping[str, float | int]) -> Loop:
    frame, known = _FRAME.search(one.attributes), _TRIPS.search(one.attributes)
    function = functions.get(int(frame[1]), "?") if frame else "?"
    place = computation, _attribute(one, "body"), _attribute(one, "condition"), function
    if known is not None:
        return Loop(*place, float(known[1]), "known")
    return Loop(*place, float(assumed[function]), "assumed") if function in assumed else Loop(*place, 1.0, "unknown")


def _frame_functions(lines: list[str]) -> dict[int, str]:
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
