"""Rounding to eight bits against float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.ops.rounding import ROUNDED, round_channels

GRIDS = {
    "int8": np.arange(-127, 128, dtype=np.float64),
    "fp8": np.unique(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)),
}
KINDS = pytest.mark.parametrize("kind", ROUNDED)
rounded = jax.jit(round_channels, static_argnums=1)


@KINDS
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_every_number_goes_to_the_nearest(kind, dtype):
    rng = np.random.default_rng(0)
    weight = (rng.standard_t(3, size=(2, 30, 64)) * np.exp(5 * rng.normal(size=(2, 30, 1)))).astype(dtype)
    found, scale = rounded(jnp.asarray(weight), kind)
    assert (found.dtype, scale.dtype, scale.shape) == (ROUNDED[kind][0], jnp.float32, (2, 30))
    exact = weight.astype(np.float64)
    wanted_scale = np.abs(exact).max(-1) / ROUNDED[kind][1]
    np.testing.assert_allclose(scale, wanted_scale, rtol=2.5e-7)
    grid = GRIDS[kind][np.isfinite(GRIDS[kind])]
    target = exact / wanted_scale[..., None]
    least = np.abs(target[..., None] - grid).min(-1)
    distance = np.abs(target - np.asarray(found).astype(np.float64))
    np.testing.assert_allclose(distance, least, rtol=0, atol=1e-6 * ROUNDED[kind][1])
    largest = np.take_along_axis(np.asarray(found).astype(np.float64), np.abs(exact).argmax(-1)[..., None], -1)
    np.testing.assert_array_equal(np.abs(largest), ROUNDED[kind][1])


@pytest.mark.parametrize(
    ("kind", "row", "wanted"),
    [
        ("int8", [127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5], [127, 0, 2, 2, 0, -2, -126]),
        ("fp8", [-448, 17, 19, 0.53125, 2**-10, 3 * 2**-10, -(2**-9)], [-448, 16, 20, 0.5, 0, 2**-8, -(2**-9)]),
    ],
)
def test_ties_go_to_even(kind, row, wanted):
    found, scale = rounded(jnp.asarray([row], jnp.float32), kind)
    np.testing.assert_array_equal(np.asarray(found, np.float32), [wanted])
    np.testing.assert_array_equal(scale, [1])


@KINDS
def test_zeros_stay_zero_and_small_channels_keep_their_numbers(kind):
    small = 1e-37 * np.array([1, -0.5, 0.25], np.float32)
    found, scale = rounded(jnp.asarray(np.stack([np.zeros(3, np.float32), small])), kind)
    np.testing.assert_array_equal(np.asarray(found[0], np.float32), 0)
    assert scale[0] == 1
    again = np.asarray(found[1], np.float64) * float(scale[1])
    np.testing.assert_allclose(again, small, atol=np.finfo(np.float32).tiny / 2)


@KINDS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_scale_of_what_is_not_finite_is_nan(kind, bad):
    weight = np.ones((2, 3), np.float32)
    weight[1, 2] = bad
    scale = np.asarray(rounded(jnp.asarray(weight), kind)[1])
    np.testing.assert_array_equal(np.isnan(scale), [False, True])
