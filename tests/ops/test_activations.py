import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.activations import silu_glu, situ

GATE = np.array([0, 1, 4, 8, 20, -1, -8], np.float32)
UP = np.array([1, 1, 30, 100, 100, -30, 5], np.float32)
TABLE = np.array([0, 0.715818, 62.3487, 96.3058, 99.9239, 5.49118, -0.00638088])  # β = 4, β_lin = 25


def formula(gate, up, beta, linear_beta):
    gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    up = up if linear_beta is None else linear_beta * np.tanh(up / linear_beta)
    return beta * np.tanh(gate / beta) / (1 + np.exp(-gate)) * up


def test_situ_table():
    np.testing.assert_allclose(situ(jnp.asarray(GATE), jnp.asarray(UP), 4.0, 25.0), TABLE, rtol=3e-6)


@pytest.mark.parametrize(("beta", "linear_beta"), [(4.0, 25.0), (1.0, None), (4.0, None), (0.5, 2.0)])
def test_situ_formula(beta, linear_beta):
    """Without a linear β the up side is unbounded."""
    found = situ(jnp.asarray(GATE), jnp.asarray(UP), beta, linear_beta)
    np.testing.assert_allclose(found, formula(GATE, UP, beta, linear_beta), rtol=3e-6)


def test_situ_in_bfloat16_is_computed_in_float32_and_rounded_once():
    rng = np.random.default_rng(0)
    gate, up = (jnp.asarray(rng.normal(size=1000) * 10, jnp.bfloat16) for _ in range(2))
    found = situ(gate, up, 4.0, 25.0)
    assert found.dtype == jnp.bfloat16
    wanted = formula(gate, up, 4.0, 25.0)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2.0**-8)


def test_silu_glu():
    wanted = GATE.astype(np.float64) / (1 + np.exp(-GATE.astype(np.float64))) * UP
    np.testing.assert_allclose(silu_glu(jnp.asarray(GATE), jnp.asarray(UP)), wanted, rtol=1e-6)
