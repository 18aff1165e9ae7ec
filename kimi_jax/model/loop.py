"""Running layers: one alone, and those that repeat as a scan over stacks of them (`kimi_jax.model.segments`)."""

from collections.abc import Callable, Mapping, Sequence
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
from kimi_jax.model.lora import HALVES, dropout_round
from kimi_jax.model.segments import Segment
from kimi_jax.ops.attn_res import Bank

Choices = Mapping[int, Int[Array, "B T A"]]
"""Expert numbers by 0-based layer, in place of the router's own."""
Observer = Callable[[LayerTrace], Any]
"""What to keep of a layer's trace: a tree of arrays."""


def starts_block(config: ModelConfig, layers: Sequence[int], number: Array | None = None) -> Array | bool:
    """Whether one of `layers`, the `number`-th, starts a block of Attention Residuals; known early where all agree."""
    block = config.attn_res_block_size
    starts = [block is not None and layer % block == 0 for layer in layers]
    return starts[0] if number is None or len(set(starts)) == 1 else jnp.asarray(starts)[number]


def _is_expert(path: tuple[Any, ...], _: Any) -> bool:
    return "experts" in path and path[-1] not in HALVES


def _stack_choices(choice: Choices, layers: range) -> Array | None:
    """The given choices of a loop's layers, one a round; None where none is given."""
    given = [choice[layer] for layer in layers if layer in choice]
    if given and len(given) < len(layers):
        missing = next(layer for layer in layers if layer not in choice)
        raise ValueError(
            f"choice: layers {layers.start}, {layers.start + layers.step}, … run as a loop: {missing} lacks"
        )
    return jnp.stack(given) if given else None


def run_layer(
    number: int,
    layer: DecoderLayer,
    prefix: Array,
    bank: Bank | None,
    call: Call,
    cache: LayerCache | None,
    choice: Array | None,
    observe: Observer | None,
    remat: bool,
) -> tuple[Array, Bank | None, tuple[LayerCache, ...], list[Any]]:
    """Runs one layer; returns what `run_loop` does."""
    starts = starts_block(layer.config, [number])

    def run(prefix: Array, bank: Bank | None) -> tuple[Any, ...]:
        prefix, bank, trace = layer(prefix, bank, call, cache, choice, number, starts)
        return prefix, bank, () if cache is None else (trace.cache,), [observe(trace)] if observe else []

    if not remat or bank is None:
        return (jax.checkpoint(run) if remat else run)(prefix, bank)
    held = bank.held  # stays a Python number where it is one

    def again(prefix: Array, sums: Array, scores: Array, queries: Array) -> tuple[Any, ...]:
        prefix, after, *rest = run(prefix, Bank(sums, scores, queries, held))
        return prefix, after.sums, after.scores, *rest

    prefix, sums, scores, caches, found = jax.checkpoint(again)(prefix, bank.sums, bank.scores, bank.queries)
    return prefix, Bank(sums, scores, bank.queries, held + starts), caches, found


def run_loop(
    part: Segment,
    layers: Sequence[DecoderLayer],
    prefix: Array,
    bank: Bank | None,
    call: Call,
    caches: Sequence[LayerCache] | None,
    choice: Choices,
    observe: Observer | None,
    remat: bool,
) -> tuple[Array, Bank | None, tuple[LayerCache, ...], list[Any]]:
    """Runs the rounds of a segment.

    Small parameters, adapters and KDA caches are sliced a round; the experts and the latent caches stay whole, and what
    reads them is told the round: a slice would be a copy. Caches are carried, so that each round writes in place.
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
            with dropout_round(number):
                prefix, bank, trace = layer(prefix, bank, at, held, chosen[place], layer_number, starts)
            if isinstance(own, KDACache):
                after.append(jax.tree.map(lambda x, new: x.at[number].set(new), own, trace.cache))
            else:
                after.append(trace.cache)
            traces.append(observe(trace) if observe else None)
        return (prefix, bank, None if caches is None else tuple(after)), traces

    numbers = jnp.arange(part.rounds, dtype=jnp.int32)
    start = (prefix, bank, None if caches is None else tuple(caches))
    rest = [small for _, _, small in split]
    body = jax.checkpoint(one_round, prevent_cse=False) if remat else one_round
    (prefix, bank, after), traces = jax.lax.scan(body, start, (numbers, rest, chosen))
    rounds = range(part.rounds) if observe else ()
    found = [jax.tree.map(lambda x, number=number: x[number], trace) for number in rounds for trace in traces]
    return prefix, bank, after or (), found
