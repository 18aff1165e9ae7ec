"""The layers that repeat, run as a loop: `jax.lax.scan` over stacks of them (`kimi_jax.model.segments`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import KDACache, LayerCache
from kimi_jax.model.call import Call
from kimi_jax.model.decoder import DecoderLayer, LayerTrace
from kimi_jax.model.segments import Segment
from kimi_jax.ops.attn_res import Bank

Choices = Mapping[int, Int[Array, "B T A"]]
"""Expert numbers by 0-based layer, in place of the router's own."""


def starts_block(config: ModelConfig, layers: Sequence[int], number: Array | None = None) -> Array | bool:
    """Whether one of `layers`, the `number`-th, starts a block of Attention Residuals; known early where all agree."""
    block = config.attn_res_block_size
    starts = [block is not None and layer % block == 0 for layer in layers]
    return starts[0] if number is None or len(set(starts)) == 1 else jnp.asarray(starts)[number]


def _is_expert(path: tuple[Any, ...], _: Any) -> bool:
    return "experts" in path


def _stack_choices(choice: Choices, layers: range) -> Array | None:
    """The given choices of a loop's layers, one a round; None where none is given."""
    given = [choice[layer] for layer in layers if layer in choice]
    if given and len(given) < len(layers):
        missing = next(layer for layer in layers if layer not in choice)
        raise ValueError(
            f"choice: layers {layers.start}, {layers.start + layers.step}, … run as a loop: {missing} lacks"
        )
    return jnp.stack(given) if given else None


def run_loop(
    part: Segment,
    layers: Sequence[DecoderLayer],
    prefix: Array,
    bank: Bank | None,
    call: Call,
    caches: Sequence[LayerCache] | None,
    choice: Choices,
    seen: bool,
) -> tuple[Array, Bank | None, tuple[LayerCache, ...], dict[int, LayerTrace]]:
    """Runs the rounds of a segment.

    Small parameters and KDA caches are sliced a round; the experts and the latent caches stay whole, and what reads
    them is told the round: a slice would be a copy. Caches are carried, so that each round writes in place.
    """
    split: list[Any] = [nnx.split(layer, _is_expert, ...) for layer in layers]
    chosen = [_stack_choices(choice, part.layers(place)) for place in range(part.period)]
    if bank is not None:
        bank = bank._replace(held=jnp.asarray(bank.held, jnp.int32))

    def one_round(carry: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        prefix, bank, caches = carry
        number, rest, chosen = inputs
        traces, after = [], []
        for place, (graphdef, experts, _) in enumerate(split):
            layer = nnx.merge(graphdef, experts, rest[place])
            own = None if caches is None else caches[place]
            starts = starts_block(layer.config, part.layers(place), number)
            held = jax.tree.map(lambda x: x[number], own) if isinstance(own, KDACache) else own
            at = replace(call, round=number)
            layer_number = part.first + number * part.period + place
            prefix, bank, trace = layer(prefix, bank, at, held, chosen[place], layer_number, starts)
            if isinstance(own, KDACache):
                after.append(jax.tree.map(lambda x, new: x.at[number].set(new), own, trace.cache))
            else:
                after.append(trace.cache)
            traces.append(trace)
        return (prefix, bank, None if caches is None else tuple(after)), traces if seen else None

    numbers = jnp.arange(part.rounds, dtype=jnp.int32)
    start = (prefix, bank, None if caches is None else tuple(caches))
    rest = [small for _, _, small in split]
    (prefix, bank, after), traces = jax.lax.scan(one_round, start, (numbers, rest, chosen))
    found = {}
    if seen:
        for number in range(part.rounds):
            for place in range(part.period):
                layer = part.first + number * part.period + place
                found[layer] = jax.tree.map(lambda x, number=number: x[number], traces[place])
    return prefix, bank, after or (), found
