import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.convolution import short_convolution

ROWS, TOKENS, CHANNELS = 6, 5, 4
LENGTHS = np.arange(6, dtype=np.int32)  # one row a length, 0 to 5

convolve = jax.jit(short_convolution)


@pytest.fixture(scope="module")
def arguments():
    """`x`, `weight`, `tail` for the three convolutions side by side."""
    rng = np.random.default_rng(0)
    shapes = (ROWS, TOKENS, 3, CHANNELS), (3, CHANNELS, 4), (ROWS, 3, 3, CHANNELS)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def silu(x):
    x = np.asarray(x, np.float64)
    return x / (1 + np.exp(-x))


def test_equals_a_loop_over_tokens_and_taps(arguments):
    x, weight, tail = arguments
    found, _ = convolve(x, weight, tail, LENGTHS)
    wanted = np.zeros(x.shape)
    for b, t, p, c in np.ndindex(x.shape):
        for tap in range(4):
            at = t + tap - 3  # tap 3 is the current token
            value = x[b, at, p, c] if at >= 0 else tail[b, at + 3, p, c]
            wanted[b, t, p, c] += float(value) * float(weight[p, c, tap])
    np.testing.assert_allclose(found, silu(wanted), rtol=1e-5, atol=1e-6)


def test_no_tap_reaches_before_a_document(arguments):
    """A document a row from place 0 to 5 on, each as if it were alone; NaN stands before it."""
    x, weight, tail = arguments
    begins = np.arange(ROWS)
    before = np.arange(TOKENS)[None, :] < begins[:, None]
    since = np.where(before, 0, begins[:, None]).astype(np.int32)
    poisoned = np.where(before[:, :, None, None], np.nan, x)
    found, _ = convolve(poisoned, weight, np.full_like(tail, np.nan), LENGTHS, since)
    for row, begin in enumerate(begins[:TOKENS]):
        alone = np.zeros_like(x[:1])
        alone[0, : TOKENS - begin] = x[row, begin:]
        wanted, _ = convolve(np.tile(alone, (ROWS, 1, 1, 1)), weight, np.zeros_like(tail), LENGTHS)
        np.testing.assert_array_equal(found[row, begin:], wanted[0, : TOKENS - begin])


@pytest.mark.parametrize("which", range(3))
def test_the_last_tap_is_the_current_token_and_the_first_is_three_before(arguments, which):
    """One of q, k, v gets taps (0, 0, 0, 1), the others (1, 0, 0, 0)."""
    x, _, _ = arguments
    weight = np.zeros((3, CHANNELS, 4), np.float32)
    weight[:, :, 0] = 1
    weight[which] = (0, 0, 0, 1)
    found, _ = convolve(x, weight, np.zeros((ROWS, 3, 3, CHANNELS), np.float32), LENGTHS)
    wanted = np.zeros(x.shape)
    wanted[:, 3:] = x[:, :-3]
    wanted[:, :, which] = x[:, :, which]
    np.testing.assert_allclose(found, silu(wanted), rtol=1e-6, atol=1e-7)


def test_the_tail_holds_the_last_three_real_inputs_whatever_the_padding(arguments):
    """Lengths 0 to 5; the padding is NaN."""
    x, weight, tail = arguments
    padded = np.where(np.arange(TOKENS)[None, :, None, None] < LENGTHS[:, None, None, None], x, np.nan)
    found, new_tail = convolve(padded, weight, tail, LENGTHS)
    clean, _ = convolve(x, weight, tail, LENGTHS)
    for row, length in enumerate(LENGTHS):
        history = [*tail[row], *x[row, :length]]
        np.testing.assert_array_equal(new_tail[row], history[-3:])
        np.testing.assert_array_equal(found[row, :length], clean[row, :length])


@pytest.mark.parametrize("length", range(1, 5))
def test_a_short_prompt_has_zeros_before_its_first_token(arguments, length):
    x, weight, _ = arguments
    _, tail = convolve(x, weight, np.zeros((ROWS, 3, 3, CHANNELS), np.float32), np.full(ROWS, length, np.int32))
    history = np.concatenate([np.zeros((ROWS, 3, 3, CHANNELS)), x[:, :length]], axis=1)
    np.testing.assert_array_equal(tail, history[:, -3:])


@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 1), (2, 3), (3, 2), (4, 1)])
def test_any_split_gives_the_same(arguments, pieces):
    x, weight, tail = arguments
    whole, last = convolve(x, weight, tail, np.full(ROWS, TOKENS, np.int32))
    outs, at = [], 0
    for size in pieces:
        out, tail = convolve(x[:, at : at + size], weight, tail, np.full(ROWS, size, np.int32))
        outs.append(out)
        at += size
    np.testing.assert_allclose(np.concatenate(outs, axis=1), whole, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(tail, last)


def test_bfloat16_is_summed_in_float32_and_the_tail_keeps_its_dtype():
    """1 + 2⁻⁹ + 2⁻⁹ + 2⁻⁹ rounds up to 1 + 2⁻⁷ once; added one after the other in bfloat16 it stays 1."""
    weight = jnp.ones((3, 1, 4), jnp.bfloat16)
    x = jnp.full((1, 1, 3, 1), 2.0**-9, jnp.bfloat16)
    tail = jnp.tile(jnp.array([1, 2.0**-9, 2.0**-9]).reshape(1, 3, 1, 1), (1, 1, 3, 1))
    found, new_tail = convolve(x, weight, tail, jnp.array([1]))
    assert (found.dtype, new_tail.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(found[0, 0, 0, 0], np.asarray(silu(1 + 3 * 2.0**-9)).astype(jnp.bfloat16))
    assert found[0, 0, 0, 0] != np.asarray(silu(1.0)).astype(jnp.bfloat16)
