import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.ops import mxfp4
from kimi_jax.ops.mxfp4 import dequantize_on_host, pack, quantize, scale_values, unpack

EVERY_BYTE = np.arange(256, dtype=np.uint8)
EVERY_SCALE = np.arange(256, dtype=np.uint8)[:, None]
dequantize = jax.jit(mxfp4.dequantize, static_argnums=2)
FLOAT32 = jnp.dtype(jnp.float32)
SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1(code):
    """A code's value from the format's definition: sign, two exponent bits with bias 1, one mantissa bit."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


def codes_of_every_scale():
    """`[256, 32]`: each of the 256 scales has the 16 codes twice, the second time in reverse."""
    codes = np.concatenate([np.arange(16), np.arange(16)[::-1]]).astype(np.uint8)
    return np.broadcast_to(codes, (256, 32))


def packed_of_every_scale():
    codes = codes_of_every_scale()
    return jnp.asarray(codes[:, 0::2] + 16 * codes[:, 1::2])


@pytest.fixture(scope="module")
def values():
    """What `codes_of_every_scale` stand for, in float64."""
    mantissas = np.array([[e2m1(int(code)) for code in row] for row in codes_of_every_scale()])
    return mantissas * 2.0 ** (np.arange(256)[:, None] - 127)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_code_of_every_scale_is_exact(values, dtype):
    found = dequantize(packed_of_every_scale(), jnp.asarray(EVERY_SCALE), jnp.dtype(dtype))
    assert found.dtype == dtype
    found = np.asarray(found, np.float64)
    np.testing.assert_array_equal(found[2:253], values[2:253])
    np.testing.assert_array_equal(np.signbit(found[2:253]), np.signbit(values[2:253]))  # -0 stays -0
    # At the ends: zeros for 0; ±0.5·2^-126 may vanish for 1; what reaches 2^128 is infinite for 253 and 254.
    np.testing.assert_array_equal(found[0], np.zeros(32))
    is_normal = np.abs(values[1]) >= 2.0**-126
    np.testing.assert_array_equal(found[1][is_normal], values[1][is_normal])
    assert set(found[1][~is_normal]) <= {0, 2.0**-127, -(2.0**-127)}
    for scale in (253, 254):
        wanted = np.where(np.abs(values[scale]) < 2.0**128, values[scale], np.copysign(np.inf, values[scale]))
        np.testing.assert_array_equal(found[scale], wanted)
    assert np.isnan(found[255]).all()


def test_scale_bytes_are_powers_of_two():
    found = np.asarray(scale_values(jnp.asarray(EVERY_BYTE)), np.float64)
    np.testing.assert_array_equal(found[1:255], 2.0 ** (np.arange(1, 255) - 127))
    assert np.isnan(found[255])


@pytest.mark.parametrize(("byte", "pair"), [(0x21, (0.5, 1.0)), (0x9F, (-6.0, -0.5))])
def test_low_nibble_comes_first(byte, pair):
    found = dequantize(jnp.full(16, byte, jnp.uint8), jnp.array([127], jnp.uint8), FLOAT32)
    np.testing.assert_array_equal(found, pair * 16)


def test_unpack_and_pack_are_inverse_for_every_byte():
    codes = unpack(jnp.asarray(EVERY_BYTE))
    np.testing.assert_array_equal(codes[0::2], EVERY_BYTE % 16)
    np.testing.assert_array_equal(codes[1::2], EVERY_BYTE // 16)
    np.testing.assert_array_equal(pack(codes), EVERY_BYTE)


def test_groups_of_32_have_their_own_scale_along_the_last_axis():
    """`[2, 3, 96]` of ones: three scales a row, none of them alike."""
    scale = np.arange(120, 138, dtype=np.uint8).reshape(2, 3, 3)
    found = dequantize(jnp.full((2, 3, 48), 0x22, jnp.uint8), jnp.asarray(scale), FLOAT32)
    np.testing.assert_array_equal(found, np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=-1))


def test_the_host_gives_the_same_numbers(values):
    found = dequantize_on_host(np.asarray(packed_of_every_scale()), EVERY_SCALE)
    assert found.dtype == np.float32
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found[1:255], values[1:255].astype(np.float32))
    np.testing.assert_array_equal(np.signbit(found[1:255]), np.signbit(values[1:255]))
    np.testing.assert_array_equal(found[0], np.zeros(32))
    assert np.isnan(found[255]).all()


# Quantising


def nearest_even(x, exponent):
    """The code of one number by trying all sizes; of two equally near the one with an even code."""
    distances = np.abs(SIZES - abs(x) / 2.0**exponent)
    code = min(range(8), key=lambda c: (distances[c], c % 2))
    return code | 8 * int(np.signbit(x))


def best(group):
    """Exponent and codes of a group by the rule: of two exponents the one of the smaller error, or the first."""
    first = int(np.floor(np.log2(np.abs(group).max()))) - 2
    tried = []
    for exponent in (first, first + 1):
        codes = [nearest_even(x, exponent) for x in group]
        error = sum((abs(x) - SIZES[code & 7] * 2.0**exponent) ** 2 for x, code in zip(group, codes, strict=True))
        tried.append((error, exponent, codes))
    return min(tried, key=lambda found: found[:2])[1:]


def quantized(x):
    """Codes, one each, and scales."""
    packed, scale = quantize(x)
    return np.asarray(unpack(jnp.asarray(packed))), scale


@pytest.mark.parametrize("exponent", [-123, -3, 0, 5, 123])
def test_quantised_numbers_are_the_nearest_with_ties_to_even(exponent):
    """Every multiple of 1/8 up to 8 with both signs, in groups whose largest and whose others decide the scale."""
    eighths = np.arange(64) / 8.0
    groups = np.stack(
        [
            np.resize(np.concatenate([[top], sign * eighths[eighths <= top][start::2]]), 32)
            for top, sign, start in itertools.product((4.0, 4.125, 5.0, 6.0, 7.0, 7.875), (1, -1), (0, 1))
        ]
    )
    codes, scale = quantized((groups * 2.0**exponent).astype(np.float32))
    wanted = [best(group) for group in groups]
    assert {first for first, _ in wanted} == {0, 1}
    np.testing.assert_array_equal(scale[:, 0], [127 + exponent + first for first, _ in wanted])
    np.testing.assert_array_equal(codes, [codes for _, codes in wanted])


def test_the_scale_with_the_smaller_error_is_taken():
    """By hand: 7.5 alone is 6 + 1.5 or 8 − 0.5; among sevens and halves the halves decide; 5 is 4 + 1 or 4 + 1."""
    x = np.zeros((3, 32), np.float32)
    x[0, 9] = 7.5
    x[1] = 0.5
    x[1, 0] = -6.5
    x[2, 31] = 5.0
    codes, scale = quantized(x)
    np.testing.assert_array_equal(scale[:, 0], [128, 127, 127])
    np.testing.assert_array_equal(codes[0, 8:10], [0, 6])
    np.testing.assert_array_equal(codes[1], [15] + 31 * [1])
    np.testing.assert_array_equal(codes[2, 30:], [0, 6])


def test_quantising_saturates_at_six():
    """The halves would be lost at the next scale, a squared error of 0.25 each: more than what is cut off the tops."""
    x = np.full((2, 32), 0.5, np.float32)
    x[0, :2], x[1, :3] = (6.99, -6.5), (-6.99, 5.0, 5.01)
    codes, scale = quantized(x)
    np.testing.assert_array_equal(scale, [[127], [127]])
    np.testing.assert_array_equal(codes[0, :3], [7, 15, 1])
    np.testing.assert_array_equal(codes[1, :4], [15, 6, 7, 1])  # 5 is a tie between 4 and 6, and 4 has the even code


def test_values_survive_dequantising_and_quantising():
    """Every value; and every byte where the largest magnitude is 4 or 6 times the scale."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (8, 252, 32)).astype(np.uint8)
    tops = np.array([1, 2, 3, 4, 5, 6, 7, 14])  # largest code of each batch of groups
    codes = np.where((codes & 7) > (tops[:, None, None] & 7), codes & 8, codes).astype(np.uint8)
    codes[:, :, 5] = tops[:, None]
    scale = np.broadcast_to(np.arange(1, 253, dtype=np.uint8)[:, None], (8, 252, 1))
    packed = np.asarray(pack(jnp.asarray(codes)))
    x = dequantize_on_host(packed, scale)
    packed_again, scale_again = quantize(x)
    x_again = dequantize_on_host(packed_again, scale_again)
    np.testing.assert_array_equal(x_again, x)
    np.testing.assert_array_equal(np.signbit(x_again), np.signbit(x))
    full = np.isin(tops & 7, (6, 7))
    np.testing.assert_array_equal(packed_again[full], packed[full])
    np.testing.assert_array_equal(scale_again[full], scale[full])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_groups_of_zeros_subnormals_and_the_largest_numbers(dtype):
    tiny, huge = 2.0**-130, 6 * 2.0**125
    x = np.zeros((5, 32))
    x[1, 3], x[2, 4], x[3, 4:6], x[4, 0] = -0.0, tiny, (huge, -huge), 1.875 * 2.0**127
    codes, scale = quantized(x.astype(dtype))
    assert scale[0, 0] == scale[1, 0] == 127
    assert not codes[0].any()
    assert list(codes[1]) == [0, 0, 0, 8] + 28 * [0]
    assert 1 <= scale[2, 0] <= 127
    assert set(codes[2]) == {0}
    np.testing.assert_array_equal(scale[3:], [[252], [252]])
    np.testing.assert_array_equal(codes[3, 4:6], [7, 15])
    assert codes[4, 0] == 7


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_group_that_is_not_finite_gets_the_nan_scale_and_no_other_does(bad):
    x = np.ones((3, 32), np.float32)
    x[1, 7] = bad
    _, scale = quantized(x)
    np.testing.assert_array_equal(scale, [[125], [255], [125]])


def test_groups_of_a_wide_array_are_quantised_each_by_itself():
    scales = np.exp2(np.arange(6)).reshape(2, 3, 1)
    x = (np.random.default_rng(0).normal(size=(2, 3, 32)) * scales).reshape(2, 96).astype(np.float32)
    codes, scale = quantized(x)
    alone = quantized(x.reshape(6, 32))
    np.testing.assert_array_equal(codes.reshape(6, 32), alone[0])
    np.testing.assert_array_equal(scale.reshape(6, 1), alone[1])
