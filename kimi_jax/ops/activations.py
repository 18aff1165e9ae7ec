"""The gated activations of the MLPs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_jax.ops.norms import at_least_float32


def situ(
    gate: Float[Array, "*shape"], up: Float[Array, "*shape"], beta: float, linear_beta: float | None
) -> Float[Array, "*shape"]:
    """SiTU-GLU: `β·tanh(g/β)·σ(g) · β_lin·tanh(u/β_lin)` in float32, cast to the dtype of `gate`.

    **Arguments:**

    - `gate`, `up`: the two projections.
    - `beta`: bound β of the gate side.
    - `linear_beta`: bound β_lin of the linear side; None takes `up` as it is.
    """
    g, u = at_least_float32(gate), at_least_float32(up)
    if linear_beta is not None:
        u = linear_beta * jnp.tanh(u / linear_beta)
    return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * u).astype(gate.dtype)


def silu_glu(gate: Float[Array, "*shape"], up: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`silu(g)·u`, in the dtype of `gate`."""
    return jax.nn.silu(gate) * up
