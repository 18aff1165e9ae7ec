"""What the TPU kernels, and the arrays that they read, have in common."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

LANES = 128
"""Numbers side by side in a tile of a TPU's memory."""


def lies_positions_innermost(positions: int, width: int) -> bool:
    """Whether a TPU keeps `[…, positions, width]`, as a function's argument, with the positions side by side.

    So it does where they fill whole tiles and the width does not.
    """
    return positions % LANES == 0 and width % LANES != 0


def kernel_dot(x: Array, matrix: Array, contracted: int) -> Array:
    """`x` times a matrix inside a kernel, summed over the matrix's axis `contracted`, in float32."""
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    axes = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(x, matrix, axes, precision=precision, preferred_element_type=jnp.float32)
