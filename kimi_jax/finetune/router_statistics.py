"""What the router did with a batch: how evenly it loaded the experts, and how far it went from the base model."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.model.decoder import LayerTrace


def choices_of(trace: LayerTrace) -> Array | None:
    """The observer that keeps a layer's chosen experts."""
    return trace.router_index


def expert_counts(index: Int[Array, "B T A"], real: Bool[Array, "B T"], experts: int) -> Int[Array, " E"]:
    """How many real tokens chose each expert."""
    sent = jnp.where(real[..., None], index, experts)
    return jnp.zeros(experts + 1, jnp.int32).at[sent.reshape(-1)].add(1)[:experts]


def router_load(
    chosen: Sequence[Int[Array, "B T A"]], real: Bool[Array, "B T"], experts: int
) -> dict[str, Float[Array, ""]]:
    """Load of the experts in the layers `chosen` counts.

    **Returns:** `router_max_load`: of the fullest expert over the mean, averaged over layers, and
    `router_worst_load`: the highest of any layer; `router_entropy`: of the shares over log E, averaged (1: even);
    `router_unused`: experts that no token chose, summed over layers.
    """
    counts = jnp.stack([expert_counts(index, real, experts) for index in chosen]).astype(jnp.float32)
    total = jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1)
    share = counts / total
    highest = jnp.max(share, axis=1) * experts
    entropy = -jnp.sum(jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0), axis=1)
    return {
        "router_max_load": jnp.mean(highest),
        "router_worst_load": jnp.max(highest),
        "router_entropy": jnp.mean(entropy) / jnp.log(jnp.float32(max(experts, 2))),
        "router_unused": jnp.sum(counts == 0).astype(jnp.float32),
    }


def router_drift(
    chosen: Sequence[Int[Array, "B T A"]], before: Sequence[Int[Array, "B T A"]], real: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """The share of choices, over all layers and real tokens, that are not among the choices of `before`."""
    differ = jnp.zeros((), jnp.int32)
    for new, old in zip(chosen, before, strict=True):
        kept = jnp.any(new[..., :, None] == old[..., None, :], axis=-1)
        differ += jnp.sum(~kept & real[..., None], dtype=jnp.int32)
    total = jnp.sum(real, dtype=jnp.int32) * sum(x.shape[-1] for x in chosen)
    return differ.astype(jnp.float32) / jnp.maximum(total, 1).astype(jnp.float32)
