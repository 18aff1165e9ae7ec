"""Normalisations, computed in float32 at least, and the one place where a vector meets a wider array."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float32, or float64 for float64: what sums, norms, gates and states are computed in."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def at_least_float32(x: Array) -> Array:
    """`x` in float32, or unchanged where it is wider already."""
    return x.astype(wide_dtype(x.dtype))


def along_last(vector: Float[Array, " D"], like: Float[Array, "*lead D"]) -> Float[Array, "*ones D"]:
    """`vector` with the dtype of `like` and its rank, so that the two can be multiplied or added."""
    return vector.astype(like.dtype).reshape((1,) * (like.ndim - 1) + vector.shape)


def unit_rms(x: Float[Array, "*lead D"], eps: float) -> Float[Array, "*lead D"]:
    """`x·rsqrt(mean(x²) + eps)` in float32 at least."""
    wide = at_least_float32(x)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def rms_norm(x: Float[Array, "*lead D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*lead D"]:
    """`x·rsqrt(mean(x²) + eps)` in float32, cast to `x.dtype`, then times `weight`."""
    return unit_rms(x, eps).astype(x.dtype) * along_last(weight, x)


def layer_norm(
    x: Float[Array, "*lead D"], weight: Float[Array, " D"], bias: Float[Array, " D"] | None, eps: float
) -> Float[Array, "*lead D"]:
    """LayerNorm in float32, cast to `x.dtype`; `bias` may be absent."""
    wide = at_least_float32(x)
    unit = unit_rms(wide - jnp.mean(wide, axis=-1, keepdims=True), eps)
    scaled = unit * along_last(weight, unit)
    if bias is not None:
        scaled = scaled + along_last(bias, scaled)
    return scaled.astype(x.dtype)


def l2_normalize(x: Float[Array, "*lead K"], eps: float = 1e-6) -> Float[Array, "*lead K"]:
    """`x / sqrt(Σ x² + eps)` in float32 at least: the sum, not the mean, so that `eps` is what it says."""
    wide = at_least_float32(x)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)
