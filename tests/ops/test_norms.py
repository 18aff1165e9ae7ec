import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.norms import along_last, l2_normalize, layer_norm, rms_norm, wide_dtype

EPS = 1e-5


@pytest.fixture(scope="module")
def rows():
    """`[2, 3, 16]` with rows from large to so small that eps decides."""
    rng = np.random.default_rng(0)
    scale = np.array([100, 1, 1e-1, 1e-2, 1e-3, 0]).reshape(2, 3, 1)
    return (rng.normal(size=(2, 3, 16)) * scale + scale).astype(np.float32)


@pytest.fixture(scope="module")
def weight():
    return np.random.default_rng(1).normal(size=16).astype(np.float32)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm(rows, weight, eps):
    wanted = np.empty(rows.shape)
    for at in np.ndindex(2, 3):
        row = [float(x) for x in rows[at]]
        root = np.sqrt(sum(x * x for x in row) / 16 + eps)
        wanted[at] = [x / root * float(w) for x, w in zip(row, weight, strict=True)]
    np.testing.assert_allclose(rms_norm(jnp.asarray(rows), jnp.asarray(weight), eps), wanted, rtol=2e-6)


def test_rms_norm_is_cast_before_the_weight(rows, weight):
    """float32, rounded to bfloat16, times the weight in bfloat16: two roundings, and in this order."""
    x, w = jnp.asarray(rows, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    wide, wide_weight = np.asarray(x, np.float64), np.asarray(w, np.float64)
    unit = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + EPS)
    twice = (unit.astype(jnp.bfloat16).astype(np.float64) * wide_weight).astype(jnp.bfloat16)
    once = (unit * wide_weight).astype(jnp.bfloat16)
    assert (once != twice).any()
    for given in (w, w.astype(jnp.float32)):
        found = rms_norm(x, given, EPS)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, twice)


@pytest.mark.parametrize("bias", [None, np.linspace(-1, 1, 16, dtype=np.float32)])
def test_layer_norm(rows, weight, bias):
    wanted = np.empty(rows.shape)
    for at in np.ndindex(2, 3):
        row = rows[at].astype(np.float64)
        centred = row - sum(row) / 16
        wanted[at] = centred / np.sqrt(sum(centred**2) / 16 + EPS) * weight + (0 if bias is None else bias)
    given = None if bias is None else jnp.asarray(bias)
    found = layer_norm(jnp.asarray(rows), jnp.asarray(weight), given, EPS)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_layer_norm_in_bfloat16_is_rounded_once():
    """1 − 1.0078/√1.001 is −0.0073; rounding the product first would make it −0.0078."""
    x = jnp.array([[-1.0, 1.0]], jnp.bfloat16)
    weight, bias = jnp.full(2, 1.0078125, jnp.bfloat16), jnp.ones(2, jnp.bfloat16)
    found = layer_norm(x, weight, bias, 1e-3)
    unit = 1.0078125 / np.sqrt(1.001)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, np.array([[1 - unit, 1 + unit]]).astype(jnp.bfloat16))


def test_l2_normalize_adds_eps_to_the_sum():
    """128 numbers of 1e-3: with eps on their mean the result would be 1.41 times this."""
    x = jnp.full((2, 128), 1e-3)
    np.testing.assert_allclose(l2_normalize(x), 1e-3 / np.sqrt(128e-6 + 1e-6), rtol=1e-5)


def test_l2_normalize_of_zeros_is_zero_with_a_finite_gradient():
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(l2_normalize(x)))(jnp.zeros(16))
    assert value == 0
    np.testing.assert_allclose(gradient, 1000.0, rtol=1e-5)  # 1/√1e-6


def test_l2_normalize_of_bfloat16_is_float32():
    found = l2_normalize(jnp.array([[3.0, 4.0, 1.0]], jnp.bfloat16))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.array([[3, 4, 1]]) / np.sqrt(26), rtol=1e-6)


def test_float64_is_not_narrowed(rows, weight):
    x = rows.astype(np.float64)
    with jax.enable_x64(True):
        found = rms_norm(jnp.asarray(x), jnp.asarray(weight.astype(np.float64)), EPS)
        assert wide_dtype(found.dtype) == jnp.float64
    wanted = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(found, wanted, rtol=1e-13)


def test_a_vector_along_the_last_axis():
    found = along_last(jnp.array([1.0, 2.0]), jnp.zeros((3, 4, 2), jnp.bfloat16))
    assert (found.shape, found.dtype) == ((1, 1, 2), jnp.bfloat16)
