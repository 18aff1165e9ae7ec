"""Balancing the experts without a loss of its own: the router's bias moves against the load."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def moved_bias(bias: Float[Array, " E"], load: Int[Array, " E"], rate: float) -> Float[Array, " E"]:
    """`bias + rate · sign(mean load − load)`: who got less than the mean is preferred a little more from now on.

    `load` counts the tokens of each expert. The bias takes part in the choice only, so no gradient knows of it.
    """
    counts = load.astype(bias.dtype)
    return bias + jnp.asarray(rate, bias.dtype) * jnp.sign(jnp.mean(counts) - counts)
