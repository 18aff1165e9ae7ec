"""Which decoder layers run as a loop, and what their parameters are called then.

A model's layers repeat: K3's layers 1 to 88 are two KDA layers, an MLA and a KDA layer, 22 times. Compiled one by one,
93 layers take minutes; as a loop over stacked parameters, as long as nine. A stack holds the arrays of every
`period`-th layer on a leading axis and is named by a range as Python writes it: `4:89:4`.
"""

from dataclasses import dataclass
from functools import cache

from kimi_jax.config import ModelConfig


@dataclass(frozen=True)
class Segment:
    """`rounds` rounds of `period` layers, from layer `first` on; layer by layer alike from round to round."""

    first: int
    period: int = 1
    rounds: int = 1

    @property
    def keys(self) -> tuple[str, ...]:
        """The name of each of the `period` stacks; of a segment of one round, the layer's number."""
        if self.rounds == 1:
            return tuple(str(self.first + place) for place in range(self.period))
        return tuple(f"{layers.start}:{layers.stop}:{layers.step}" for layers in map(self.layers, range(self.period)))

    def layers(self, place: int) -> range:
        """The layers at one place of the rounds."""
        return range(self.first + place, self.first + self.period * self.rounds, self.period)


@cache
def segments(config: ModelConfig, loop: bool) -> tuple[Segment, ...]:
    """A model's layers in order: each for itself, or with `loop` around the repetition that covers most of them."""
    count = config.num_layers
    whole = tuple(Segment(layer) for layer in range(count))
    best = _repetition(config) if loop else None
    if best is None:
        return whole
    return (*whole[: best.first], best, *whole[best.first + best.period * best.rounds :])


@cache
def stack_places(config: ModelConfig, loop: bool) -> dict[int, tuple[str, int | None]]:
    """Where each layer's arrays lie: a key of `params["layers"]`, and the place in that stack; None for no stack."""
    return {
        layer: (key, at if part.rounds > 1 else None)
        for part in segments(config, loop)
        for place, key in enumerate(part.keys)
        for at, layer in enumerate(part.layers(place))
    }


def _repetition(config: ModelConfig) -> Segment | None:
    """The repetition of at least two rounds that leaves the fewest layers to compile."""
    count = config.num_layers
    kinds = [(config.layer_kinds[i], config.has_experts(i), config.has_indexer(i)) for i in range(count)]
    best, saved = None, 0
    for period in range(1, count // 2 + 1):
        first = 0
        while first + 2 * period <= count:
            last = first + period
            while last < count and kinds[last] == kinds[last - period]:
                last += 1
            rounds = (last - first) // period
            if (rounds - 1) * period > saved:
                best, saved = Segment(first, period, rounds), (rounds - 1) * period
            first = max(first + 1, last - period + 1)
    return best
