"""The product of a low-rank adapter (LoRA, Hu et al. 2021): `scale · B (A x)`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_jax.ops.norms import wide_dtype


def low_rank(
    x: Float[Array, "*lead I"], a: Float[Array, "r I"], b: Float[Array, "O r"], scale: float
) -> Float[Array, "*lead O"]:
    """`scale · B (A x)` in float32 at least; both products take their factors in the dtype of `x`."""
    wide = wide_dtype(x.dtype)
    inner = jnp.einsum("...i,ri->...r", x, a.astype(x.dtype), preferred_element_type=wide)
    return scale * jnp.einsum("...r,or->...o", inner.astype(x.dtype), b.astype(x.dtype), preferred_element_type=wide)
