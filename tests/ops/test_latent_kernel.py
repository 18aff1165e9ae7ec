"""The TPU kernel of decoding, run step by step on this machine, and compiled by the TPU's own compiler."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_device import ON_TPUS, compiled_for, small_tpu

from kimi_jax.ops.latent_attention import decode_attention
from kimi_jax.ops.latent_kernel import block_size, fits_kernel, kernel_attention, kernel_work

ROWS, HEADS, WIDTH, RANK, CAPACITY = 4, 6, 144, 128, 1024
POSITIONS = np.array([700, -3, 1023, 511], np.int32)
"""In the middle of a block, no entry at all, the whole cache, the end of a block."""


@pytest.fixture(scope="module")
def arguments():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, HEADS, WIDTH)), rng.normal(size=(2, ROWS, CAPACITY, WIDTH))


@pytest.fixture(scope="module")
def kernel():
    return jax.jit(partial(kernel_attention, interpret=True), static_argnums=(2, 4))


def softmax(q, entries, scale):
    """Peak, sum and mixed values of one row in float64."""
    scores = np.einsum("nx,sx->ns", q, entries) * scale
    peak = scores.max(axis=1)
    share = np.exp(scores - peak[:, None])
    return peak, share.sum(axis=1), share @ entries[:, :RANK]


def test_each_row_sees_its_own_filled_entries(arguments, kernel):
    """What lies behind a row's position is large."""
    q, stack = (x.astype(np.float32) for x in arguments)
    for row, position in enumerate(POSITIONS):
        stack[1, row, max(0, position + 1) :] = 1e4
    found = kernel(jnp.asarray(q), jnp.asarray(stack), RANK, jnp.asarray(POSITIONS), 0.1, jnp.asarray(1))
    for row, position in enumerate(POSITIONS):
        peak, total, mixed = (np.asarray(x[row], np.float64) for x in found)
        if position < 0:
            assert np.isneginf(peak).all()
            assert not total.any()
            assert not mixed.any()
            continue
        wanted = softmax(q[row].astype(np.float64), stack[1, row, : position + 1].astype(np.float64), 0.1)
        for got, want in zip((peak, total, mixed), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_equals_the_loop(arguments, kernel):
    """One layer's cache in bfloat16, with the projections around it left out."""
    q, stack = (jnp.asarray(x, jnp.bfloat16) for x in arguments)
    w_key, w_value = (jnp.zeros((HEADS, 0, RANK), q.dtype), jnp.tile(jnp.eye(RANK, dtype=q.dtype), (HEADS, 1, 1)))
    # Without a width of its own the folded query begins with zeros: the values' part of an entry scores nothing.
    only_extra = q.at[..., :RANK].set(0)
    positions = jnp.maximum(jnp.asarray(POSITIONS), 0)
    scale = (WIDTH - RANK) ** -0.5
    _, total, mixed = kernel(only_extra, stack[0], RANK, positions, scale, None)
    wanted = decode_attention(only_extra[:, None, :, RANK:], stack[0], w_key, w_value, positions[:, None], 4)[:, 0]
    found = np.asarray(mixed / total[..., None])
    np.testing.assert_allclose(found, np.asarray(wanted, np.float64), rtol=2**-6, atol=2**-6 * np.abs(found).max())


def test_shapes_that_the_kernel_takes():
    def fits(queries, latents, rank=512, dtypes=(jnp.bfloat16, jnp.bfloat16)):
        return fits_kernel(*map(jax.ShapeDtypeStruct, (queries, latents), dtypes), rank)

    assert fits((4, 1, 6, 192), (22, 4, 8192, 576))
    assert not fits((4, 2, 6, 192), (22, 4, 8192, 576))  # a prompt
    assert not fits((4, 1, 6, 192), (22, 4, 8000, 576))
    assert not fits((4, 1, 6, 192), (22, 4, 8192, 640))  # it lies the other way on a TPU
    assert not fits((4, 1, 6, 192), (22, 4, 8192, 576), dtypes=(jnp.bfloat16, jnp.float8_e4m3fn))
    assert [block_size(capacity) for capacity in (8192, 1152, 640)] == [512, 384, 128]


def test_work_of_a_call():
    """700 of 1024 positions are two blocks of 512."""
    flops, moved = kernel_work([(4, 6, 576), (2, 4, 576, 1024)], 700, 512, 2)
    assert (flops, moved) == (2 * 4 * 6 * 1024 * (576 + 512), 4 * 1024 * 576 * 2)
    assert kernel_work([(4, 6, 576), (2, 4, 576, 2048)], 700, 512, 2)[1] == moved


@ON_TPUS
def test_compiled_for_tpu(name, shape, devices):
    """K3's latents of 16 rows at 8,192: Mosaic takes the kernel, and the stack of layers is not copied for it."""
    pod = small_tpu(name, shape, devices)

    def attend(q, latents, positions, layer):
        return kernel_attention(q, latents, 512, positions, 0.1, layer)

    q, latents = ((16, 6, 576), jnp.bfloat16), ((22, 16, 8192, 576), jnp.bfloat16)
    compiled = compiled_for(pod, attend, q, latents, ((16,), jnp.int32), ((), jnp.int32))
    assert "tpu_custom_call" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**21
