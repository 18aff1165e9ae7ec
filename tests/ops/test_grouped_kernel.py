"""The kernels for TPU and GPU, run step by step on this machine, and compiled for both where compilers are there."""

import dataclasses
from functools import partial
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_device import ON_TPUS, compiled_for, small_tpu

from kimi_jax.ops.grouped_gpu_kernel import (
    fits_gpu_kernel,
    gpu_kernel_product,
    gpu_kernel_work,
    gpu_tile_rows,
    row_visits,
)
from kimi_jax.ops.grouped_kernel import fits_kernel, kernel_product, kernel_work, visits
from kimi_jax.planning import topology
from kimi_jax.planning.pods import Pod

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
LAYERS, OUT, IN = 2, 128, 512


def packed_layers(experts, out=OUT, into=IN):
    """Two layers of packed experts, and the second one's matrices in float64."""
    rng = np.random.default_rng(experts)
    codes = rng.integers(0, 16, (LAYERS, experts, out, into))
    scale = rng.integers(120, 134, (LAYERS, experts, out, into // 32)).astype(np.uint8)
    arrays = {"weight_packed": (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8), "weight_scale": scale}
    values = CODES[codes] * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=-1)
    return {name: jnp.asarray(x) for name, x in arrays.items()}, values[1]


@partial(jax.jit, static_argnames=("form", "transposed"))
def second_layer(form, rows, arrays, sizes, transposed):
    return form(rows, {**arrays, "layer": jnp.array(1)}, sizes, transposed=transposed, interpret=True)


both = pytest.mark.parametrize("form", [kernel_product, gpu_kernel_product], ids=["TPU", "GPU"])


@both
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (40, (3, 0, 20, 10)),  # a tile of 16 rows holds three experts, and the last tile is cut
        (40, (0, 0, 0, 0)),
        (7, (0, 0, 0, 7)),
        (300, (130, 1, 2, 150)),  # an expert of several tiles
        (300, (0, 300, 0, 0)),
        (256, (64, 64, 64, 64)),  # groups end where tiles do
    ],
    ids=str,
)
def test_every_row_meets_its_expert(rows, sizes, transposed, form):
    arrays, matrices = packed_layers(len(sizes))
    x = np.full((rows, OUT if transposed else IN), np.nan, np.float32)
    x[: sum(sizes)] = np.random.default_rng(rows).normal(size=(sum(sizes), x.shape[1]))
    wanted = np.zeros((rows, IN if transposed else OUT))
    for expert, (start, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        matrix = matrices[expert].T if transposed else matrices[expert]
        wanted[start:end] = x[start:end].astype(np.float64) @ matrix.T
    found = second_layer(form, x, arrays, jnp.array(sizes, jnp.int32), transposed)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max(initial=1))
    np.testing.assert_array_equal(found[sum(sizes) :], 0)


@both
def test_bfloat16_rows_lose_only_their_own_rounding(form):
    arrays, matrices = packed_layers(2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, IN)), jnp.bfloat16)
    found = second_layer(form, x, arrays, jnp.array([16, 16], jnp.int32), False)
    exact = np.concatenate([np.asarray(x[i : i + 16], np.float64) @ matrices[i // 16].T for i in (0, 16)])
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8, atol=1e-5 * np.abs(exact).max())


@both
@pytest.mark.parametrize("scale", [2, 252])
def test_scales_at_the_ends_of_the_range(scale, form):
    """Each row picks one number, which must come out as it is: 0.5·2^-125 to 6·2^125."""
    arrays, _ = packed_layers(2)
    arrays["weight_scale"] = jnp.full_like(arrays["weight_scale"], scale)
    x = jnp.eye(32, IN, dtype=jnp.bfloat16)
    found = np.asarray(second_layer(form, x, arrays, jnp.array([16, 16], jnp.int32), False), np.float64)
    codes = np.asarray(arrays["weight_packed"])[1]
    wanted = np.stack([codes[i // 16, :, i // 2] >> 4 * (i % 2) & 15 for i in range(32)])
    np.testing.assert_array_equal(found, CODES[wanted] * 2.0 ** (scale - 127))


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((3, 0, 20, 10), [(0, 0), (2, 0), (2, 1), (3, 1), (3, 2)]),
        ((0, 16, 0, 1), [(1, 0), (3, 1)]),
        ((0, 0, 0, 40), [(3, 0), (3, 1), (3, 2)]),
    ],
)
def test_visits(sizes, wanted):
    """Pairs of expert and tile of 16 rows, in order; no expert without rows."""
    expert, tile, count, bounds = visits(jnp.array(sizes, jnp.int32), 40, 16)
    assert list(zip(expert.tolist(), tile.tolist(), strict=True))[: int(count)] == wanted
    assert bounds.tolist() == [*accumulate(sizes, initial=0)]


def test_nothing_to_visit_is_one_visit_of_nothing():
    _, _, count, bounds = visits(jnp.zeros(3, jnp.int32), 40, 16)
    assert (int(count), bounds.tolist()) == (1, [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((3, 0, 20, 10), [(0, 0, 3), (2, 3, 19), (2, 19, 23), (3, 23, 33)]),
        (
            (1, 1, 1, 37),
            [(0, 0, 1), (1, 1, 2), (2, 2, 3), (3, 3, 19), (3, 19, 35), (3, 35, 40)],
        ),  # the most there are
        ((0, 0, 0, 0), []),
    ],
)
def test_visits_of_the_gpu_kernel(sizes, wanted):
    """Expert, first row and end of each; those that are too many have no rows."""
    found = np.stack(row_visits(jnp.array(sizes, jnp.int32), 40, 16), axis=1)
    assert found[: len(wanted)].tolist() == [[*visit] for visit in wanted]
    assert len(found) == 6
    assert np.all(found[len(wanted) :, 1] >= found[len(wanted) :, 2])


def test_shapes_that_the_gpu_kernel_takes():
    assert fits_gpu_kernel((22, 56, 3072, 1792), jnp.dtype(jnp.bfloat16))  # 6.8 GB
    assert fits_gpu_kernel((56, 3584, 1536), jnp.dtype(jnp.float32))
    assert fits_gpu_kernel((22, 28, 3072, 1792), jnp.dtype(jnp.bfloat16))  # 3.4 GB, but a layer is smaller
    assert not fits_gpu_kernel((448, 3072, 1792), jnp.dtype(jnp.bfloat16))  # 2.5 GB in one layer
    assert not fits_gpu_kernel((56, 3072, 1792), jnp.dtype(jnp.float64))
    assert not fits_gpu_kernel((56, 96, 128), jnp.dtype(jnp.bfloat16))
    assert not fits_gpu_kernel((56, 128, 192), jnp.dtype(jnp.bfloat16))


def test_rows_of_a_visit_on_gpu():
    assert [gpu_tile_rows(rows, 56, 2) for rows in (1, 256, 1024, 65536)] == [16, 16, 32, 64]
    assert gpu_tile_rows(65536, 56, 4) == 16


def test_shapes_that_the_kernel_takes():
    assert fits_kernel((22, 14, 3072, 1792))  # K3's w1 and w3
    assert fits_kernel((22, 14, 3584, 1536))  # w2
    assert not fits_kernel((16, 64, 32))
    assert not fits_kernel((16, 128, 192))
    assert not fits_kernel((16, 128, 4096))  # 256 scales a row


def test_work_of_a_call():
    """16 of 32 rows belong to experts and fill one tile of 16: 9 experts met, each fetched once."""
    flops, moved = kernel_work(32, 14, 3072, 1792, itemsize=2, filled=16.0, met=9.0)
    assert flops == 9 * 2 * 16 * 3072 * 3584
    assert moved == 9 * 3072 * (1792 + 112) + 3 * 16 * 3584 * 2 + 16 * 3072 * 2


def test_work_of_a_call_on_gpu():
    """Few rows: 9 visits of 16 rows. Many: 64 of them a visit, and half a visit more for each expert."""
    flops, moved = gpu_kernel_work(256, 56, 3072, 1792, itemsize=2, filled=16.0, met=9.0)
    assert flops == 9 * 2 * 16 * 3072 * 3584
    assert moved == 9 * 3072 * (1792 + 112) + 16 * (3584 + 3072) * 2
    flops, _ = gpu_kernel_work(65536, 56, 3072, 1792, itemsize=2, filled=4096.0, met=56.0)
    assert flops == (64 + 28) * 2 * 64 * 3072 * 3584


@ON_TPUS
def test_compiled_for_tpu(name, shape, devices):
    """K3's experts on a device of 64: Mosaic takes the kernel, and no stack of weights is copied for it."""
    pod = small_tpu(name, shape, devices)
    for transposed, rows in ((False, 32), (True, 2048)):
        compiled = compiled_product(pod, kernel_product, (22, 14, 3072, 1792), rows, jnp.bfloat16, transposed)
        assert "tpu_custom_call" in compiled.as_text()
        assert compiled.memory_analysis().temp_size_in_bytes < 6 * rows * 3584 * 2 + 2**21


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        (
            "h200-16",
            [(56, 32, jnp.bfloat16, False, 0), (56, 2048, jnp.bfloat16, True, 0), (28, 16, jnp.float32, False, 1)],
        ),
        ("b300-8", [(112, 64, jnp.bfloat16, False, 0)]),
    ],
)
def test_compiled_for_gpu(name, cases):
    """Triton takes the kernel, and no stack of weights is copied for it; one of 2 to 4 GiB has a layer cut out."""
    hint = topology.missing_compiler("cuda")
    if hint is not None:
        pytest.skip(hint)
    pod = Pod.from_file(name)
    pod = dataclasses.replace(pod, topology="1x1x1", chips=1, devices=1, mesh={"data": 1, "tensor": 1})
    for experts, rows, dtype, transposed, copied in cases:
        shape = (22, experts, 3072, 1792)
        compiled = compiled_product(pod, gpu_kernel_product, shape, rows, dtype, transposed)
        assert "xla.gpu.triton" in compiled.as_text()
        layer = experts * 3072 * (1792 + 112)
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        assert copied * layer <= temporaries < copied * layer + 6 * rows * 3584 * 4 + 2**21


def compiled_product(pod, form, shape, rows, dtype, transposed):
    """The product of `rows` rows with a stack of layers, compiled for one device of the pod."""

    def product(rows, packed, scale, layer, sizes):
        weights = {"weight_packed": packed, "weight_scale": scale, "layer": layer}
        return form(rows, weights, sizes, transposed=transposed)

    *lead, outputs, width = shape
    return compiled_for(
        pod,
        product,
        ((rows, outputs if transposed else 2 * width), dtype),
        (shape, jnp.uint8),
        ((*lead, outputs, width // 16), jnp.uint8),
        ((), jnp.int32),
        ((lead[-1],), jnp.int32),
    )
