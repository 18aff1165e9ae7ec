"""`kv_b_proj`'s adapter beside its matrix, as training has it, and in the matrix, as a cache wants it."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kimi_jax.model.layers import Linear
from kimi_jax.model.lora import dropout


def adapted(weight: float, change: float) -> Linear:
    """`[3, 4]`, all of its numbers `weight`, and an adapter of rank 2 that adds `change` to each."""
    linear = Linear(3, 4)
    linear.add_adapter(2, 0.5, "kv_b_proj")
    linear.weight = nnx.Param(jnp.full((3, 4), weight, jnp.bfloat16))
    linear.lora_A, linear.lora_B = nnx.Param(jnp.ones((2, 4))), nnx.Param(jnp.full((3, 2), change))
    return linear


def test_an_update_below_a_step_of_the_weight_counts():
    """Next to 1 bfloat16 has steps of 2⁻⁷."""
    linear, x = adapted(1.0, 2.0**-10), jnp.asarray([[1.0, 2.0, 0.5, 4.0]], jnp.bfloat16)
    wide, matrix = linear.extended(x)
    assert (wide.shape, matrix.shape) == ((1, 6), (3, 6))
    found = jnp.einsum("bi,oi->bo", wide, matrix, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(found, np.full((1, 3), 7.5 * (1 + 2.0**-10)))
    np.testing.assert_array_equal(linear.matrix(jnp.dtype(jnp.bfloat16)), np.ones((3, 4)))
    np.testing.assert_array_equal(linear.matrix(jnp.dtype(jnp.float32)), np.full((3, 4), 1 + 2.0**-10, np.float32))


def test_dropout_reaches_the_adapter_alone():
    linear, x = adapted(1.0, 1.0), jnp.ones((64, 4), jnp.float32)
    with dropout(jax.random.key(0), 0.5):
        wide, _ = linear.extended(x)
    np.testing.assert_array_equal(wide[:, :4], x)
    assert {float(value) for value in np.unique(wide[:, 4:])} == {0, 2, 4, 6, 8}  # 0 to 4 of four inputs, doubled
