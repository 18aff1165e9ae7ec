"""Matrices rounded to eight bits, with a scale for each output channel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from kimi_jax.ops.norms import at_least_float32

ROUNDED = {"int8": (jnp.dtype(jnp.int8), 127), "fp8": (jnp.dtype(jnp.float8_e4m3fn), 448)}
"""Dtypes of eight bits, and the largest number that is used of each."""
DENSE_WEIGHTS = ("bf16", *ROUNDED)
"""How the weights that are not experts may be kept; "bf16" is as the checkpoint has them."""


def round_channels(
    weight: Float[Array, "*lead O I"], kind: str
) -> tuple[Shaped[Array, "*lead O I"], Float[Array, "*lead O"]]:
    """`weight ≈ rounded · scale`, so that the largest magnitude of a channel becomes the largest number of the dtype.

    **Arguments:**

    - `weight`: `[…, O, I]`, a channel being a row of `I` numbers. `kind`: "int8" or "fp8".

    **Returns:** the rounded weight, to the nearest and ties to even, and the scales `[…, O]` in float32. A channel of
    zeros has the scale 1; one that holds NaN or infinity has the scale NaN.
    """
    dtype, largest = ROUNDED[kind]
    wide = at_least_float32(weight)
    # A maximum over several devices may lose a NaN; whether all are finite does not.
    top = jnp.where(jnp.all(jnp.isfinite(wide), axis=-1), jnp.max(jnp.abs(wide), axis=-1), jnp.nan)
    # Smaller scales than the smallest normal number may be taken for zero by a device.
    scale = jnp.where(top == 0, 1, jnp.maximum(top / largest, jnp.finfo(jnp.float32).tiny)).astype(jnp.float32)
    ratio = jnp.clip(wide / scale[..., None].astype(wide.dtype), -largest, largest)
    return (jnp.round(ratio) if kind == "int8" else ratio).astype(dtype), scale
