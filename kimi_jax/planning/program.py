"""What a compiled program's text tells: its loops, the bytes of its collectives, the work inside loop bodies.

XLA's own cost analysis counts a loop's body once. `Program.loops` finds each loop, how often it runs where the text
tells, and the function that it came from; `Program.times` is how often each computation runs, and everything here is
counted so often.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kimi_jax.planning.hlo import (
    Computation,
    Instruction,
    Shape,
    attribute,
    called_by,
    frame_functions,
    read_program,
    read_shapes,
    tuple_parts,
)

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip

_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?\}')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_NO_TRAFFIC = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota"}


Kernel = Callable[[Sequence[Shape]], tuple[float, float]]
"""FLOPs and bytes of a call of a hand-written kernel, from the arrays that it is given."""


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
    - `kernels`: work of hand-written kernels, whose insides the text does not show, by the function that calls them.
    """

    def __init__(
        self,
        text: str,
        assumed: Mapping[str, float | int] | None = None,
        kernels: Mapping[str, Kernel] | None = None,
    ) -> None:
        self.computations, self.entry, tables = read_program(text)
        self._functions, self._kernels = frame_functions(tables), kernels or {}
        self.loops = [
            self._loop(computation, one, assumed or {})
            for computation, one in self.instructions(every=True)
            if one.opcode == "while"
        ]

    def _function(self, one: Instruction) -> str:
        """The Python function that an instruction comes from."""
        frame = _FRAME.search(one.attributes)
        return self._functions.get(int(frame[1]), "?") if frame else "?"

    def _work(self, where: Computation, one: Instruction) -> tuple[float, float] | None:
        """FLOPs and bytes of a hand-written kernel; None of anything else."""
        own = one.opcode == "custom-call" and ("tpu_custom_call" in one.attributes or "triton" in one.attributes)
        kernel = self._kernels.get(self._function(one)) if own else None
        return None if kernel is None else kernel([s for shapes in where.operand_shapes(one) for s in shapes])

    def _loop(self, where: Computation, one: Instruction, assumed: Mapping[str, float | int]) -> Loop:
        known, function = _TRIPS.search(one.attributes), self._function(one)
        place = where.name, attribute(one, "body"), attribute(one, "condition"), function
        rounds = float(known[1]) if known else self._counted(where, one)
        if rounds is not None:
            return Loop(*place, rounds, "known")
        return Loop(*place, float(assumed.get(function, 1)), "assumed" if function in assumed else "unknown")

    def _counted(self, where: Computation, one: Instruction) -> float | None:
        """Rounds of a loop that runs while a counter, which JAX raises by one, is below a constant; else None."""
        condition = self.computations[attribute(one, "condition")]
        test = list(condition.instructions.values())[-1]
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        start, end = (_constant(condition, name, where, one.operands[0]) for name in test.operands)
        return None if end is None else float(max(0, end - (start or 0)))

    @cached_property
    def times(self) -> dict[str, float]:
        """How often each computation runs in one call of the program; both branches of a choice count."""
        bodies = {(loop.computation, name): loop for loop in self.loops for name in (loop.body, loop.condition)}
        times: dict[str, float] = defaultdict(float)

        def visit(name: str, count: float) -> None:
            times[name] += count
            for one in self.computations[name].instructions.values():
                for called in called_by(one):
                    loop = bodies.get((name, called))
                    if called in self.computations:
                        visit(called, count if loop is None else count * loop.rounds)

        visit(self.entry, 1.0)
        return times

    def collectives(self) -> dict[str, tuple[float, float]]:
        """Operations and bytes a device by kind: of each the larger of what goes in and what comes out."""
        found: dict[str, tuple[float, float]] = {}
        for computation, one in self.instructions():
            kind = one.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                outs = [sum(s.bytes for s in read_shapes(part)) for part in tuple_parts(one.shape)]
                # A start's result holds operands and results side by side: ((in…), (out…), …).
                out = max(outs) if one.opcode.endswith("-start") and len(outs) > 1 else sum(outs)
                into = sum(s.bytes for operand in computation.operand_shapes(one) for s in operand)
                count, size = found.get(kind, (0.0, 0.0))
                times = self.times[computation.name]
                found[kind] = (count + times, size + times * max(into, out))
        return {kind: found[kind] for kind in COLLECTIVES if kind in found}

    def product_flops(self) -> float:
        """FLOPs of the matrix products, every round counted."""
        total = 0.0
        for where, one in self.instructions():
            work = self._work(where, one)
            total += self.times[where.name] * (product_flops(where, one) if work is None else work[0])
        return total

    def traffic(self) -> float:
        """Bytes read from and written to a device's memory, every round counted; of what is sliced only the slice."""
        return sum(
            self.times[computation.name] * self._traffic(computation, one)
            for computation, one in self.instructions()
            if computation.name not in self._fused
        )

    @cached_property
    def _fused(self) -> set[str]:
        """Computations whose values never leave the chip: insides of fusions, and reducers."""
        inside: set[str] = set()
        for _, one in self.instructions(every=True):
            if one.opcode == "fusion" or ("to_apply=" in one.attributes and one.opcode != "call"):
                inside.update(called_by(one))
            elif one.opcode == "async-start" and one.operands:  # counted here, however deep in calls the work stands
                started = called_by(one)
                for name in started:
                    started += [x for made in self.computations[name].instructions.values() for x in called_by(made)]
                inside.update(started)
        return inside

    def instructions(self, every: bool = False) -> Iterator[tuple[Computation, Instruction]]:
        """Those that run, with the computation that each stands in; `every`: of computations that never run too."""
        for name, computation in self.computations.items():
            if every or self.times[name]:
                for one in computation.instructions.values():
                    yield computation, one

    def _traffic(self, computation: Computation, one: Instruction) -> float:
        """Bytes that an instruction reads from and writes to HBM; of what it slices only the slice."""
        if (work := self._work(computation, one)) is not None:
            return work[1]
        if (
            one.opcode in _NO_TRAFFIC
            or one.opcode.endswith(("-update", "-done"))
            or "called_computations=" in one.attributes
        ):
            return 0
        if one.opcode.endswith("-start"):  # the result holds what is made and what was read, side by side
            parts = [read_shapes(part) for part in tuple_parts(one.shape)[:2]]
            if one.opcode == "async-start":  # a slice, of which only that is read, or put into place
                size = min(sum(s.bytes for s in part) for part in parts)
                return sum(size for part in parts if _hbm(part))
            return sum(map(_hbm, parts))
        out, operands = _hbm(one.shapes), computation.operand_shapes(one)
        if one.opcode in ("dynamic-slice", "gather", "slice"):
            return 2 * out
        if one.opcode == "dynamic-update-slice":
            return 2 * _hbm(operands[1])
        if one.opcode != "fusion":
            return out + sum(map(_hbm, operands))
        inner = self.computations[attribute(one, "calls")]
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

    def _same_values(self, inner: Computation, number: int) -> list[str]:
        """The names that the whole of operand `number` goes by in a fusion."""
        wanted = (str(number),)
        given = [x.name for x in inner.instructions.values() if x.opcode == "parameter" and x.operands == wanted]
        for name in given:  # grows meanwhile
            for user in inner.instructions.values():
                if name not in user.operands:
                    continue
                same = user.opcode in ("bitcast", "copy", "reshape", "transpose")
                if user.opcode == "fusion":  # one that only copies may stand inside another
                    called = self.computations[attribute(user, "calls")]
                    same = _roots(called)[0].name in self._same_values(called, user.operands.index(name))
                if same:
                    given.append(user.name)
        return given

    def _sliced(self, inner: Computation, number: int) -> int | None:
        """Bytes that a fusion takes of its operand `number` where it only slices it or overwrites a slice."""
        total = 0
        given = self._same_values(inner, number)
        for name in given:
            for user in inner.instructions.values():
                if name not in user.operands or user.name in given:
                    continue
                place: int | None = 0
                if user.opcode in ("dynamic-slice", "gather", "slice") and user.operands[0] == name:
                    place = sum(s.bytes for s in user.shapes)
                elif user.opcode == "fusion":
                    called = self.computations[attribute(user, "calls")]
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


def _constant(inner: Computation, name: str, outer: Computation, carry: str) -> int | None:
    """The constant that a loop's condition knows by `name`: its own, or what `outer` puts into the tuple `carry`."""
    for _ in range(8):  # copies of copies
        one = inner.instructions.get(name)
        if one is None:
            return None
        if one.opcode == "constant":
            return int(one.operands[0]) if one.operands[0].lstrip("-").isdigit() else None
        if one.opcode in ("copy", "bitcast", "convert"):
            name = one.operands[0]
        elif one.opcode == "get-tuple-element" and inner is not outer:
            packed = outer.instructions.get(carry)
            index = re.search(r"index=(\d+)", one.attributes)
            if packed is None or packed.opcode != "tuple" or index is None:
                return None
            inner, name = outer, packed.operands[int(index[1])]
        else:
            return None
    return None
