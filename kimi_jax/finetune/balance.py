"""Balancing the experts without a loss of its own: the router's bias moves against the load."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def expert_load(index: Int[Array, "B T A"], experts: int) -> Float[Array, " E"]:
    """Token copies that each expert got."""
    return jnp.bincount(index.reshape(-1), length=experts).astype(jnp.float32)


def moved_bias(bias: Float[Array, " E"], load: Float[Array, " E"], rate: float) -> Float[Array, " E"]:
    """`bias + rate · sign(mean load − load)`: who got less than the mean is preferred a little more from now on."""
    return bias + jnp.asarray(rate, bias.dtype) * jnp.sign(jnp.mean(load) - load).astype(bias.dtype)


def load_report(loads: Mapping[str, Float[Array, " E"]]) -> dict[str, Array]:
    """How even the load is, over all layers.

    - `load_max_over_mean`: of the layer where it is largest.
    - `load_entropy`: mean over layers, of the shares, divided by that of even ones: 1 is even.
    - `experts_unused`: experts without a token, counted over layers.
    """
    load = jnp.stack(list(loads.values()))
    share = load / jnp.maximum(jnp.sum(load, axis=1, keepdims=True), 1)
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1)), axis=1)
    return {
        "load_max_over_mean": jnp.max(jnp.max(load, axis=1) / jnp.mean(load, axis=1)),
        "load_entropy": jnp.mean(entropy) / jnp.log(jnp.asarray(load.shape[1], load.dtype)),
        "experts_unused": jnp.sum(load == 0, dtype=jnp.int32),
    }
