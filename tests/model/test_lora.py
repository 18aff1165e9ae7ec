"""The adapter of `kv_b_proj`, whose matrix attention folds: beside the matrix, never rounded with it."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kimi_jax.model.layers import Linear


def test_an_update_below_a_step_of_the_weight_counts():
    """Next to 1 bfloat16 has steps of 2⁻⁷."""
    linear, bfloat16 = Linear(3, 4), jnp.dtype(jnp.bfloat16)
    linear.weight = nnx.Param(jnp.ones((3, 4), bfloat16))
    assert linear.matrices(bfloat16)[1] is None
    linear.add_adapter(2, 0.5, "kv_b_proj")
    linear.lora_A, linear.lora_B = nnx.Param(jnp.ones((2, 4))), nnx.Param(jnp.full((3, 2), 2.0**-10))
    wide, down = linear.matrices(bfloat16)
    assert (wide.shape, wide.dtype, down.shape, down.dtype) == ((3, 6), bfloat16, (2, 4), bfloat16)
    x = np.array([1.0, 2.0, 0.5, 4.0], np.float32)
    beside = np.concatenate([x, np.asarray(down, np.float32) @ x])
    np.testing.assert_array_equal(np.asarray(wide, np.float32) @ beside, np.full(3, 7.5 * (1 + 2.0**-10)))
