"""The TPU kernel, run step by step on this machine, and compiled by the TPU's own compiler where that is installed."""

import dataclasses
from functools import partial
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


@partial(jax.jit, static_argnames="transposed")
def second_layer(rows, arrays, sizes, transposed):
    return kernel_product(rows, {**arrays, "layer": jnp.array(1)}, sizes, transposed=transposed, interpret=True)


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
def test_every_row_meets_its_expert(rows, sizes, transposed):
    arrays, matrices = packed_layers(len(sizes))
    x = np.full((rows, OUT if transposed else IN), np.nan, np.float32)
    x[: sum(sizes)] = np.random.default_rng(rows).normal(size=(sum(sizes), x.shape[1]))
    wanted = np.zeros((rows, IN if transposed else OUT))
    for expert, (start, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        matrix = matrices[expert].T if transposed else matrices[expert]
        wanted[start:end] = x[start:end].astype(np.float64) @ matrix.T
    found = second_layer(x, arrays, jnp.array(sizes, jnp.int32), transposed)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max(initial=1))
    np.testing.assert_array_equal(found[sum(sizes) :], 0)


def test_bfloat16_rows_lose_only_their_own_rounding():
    arrays, matrices = packed_layers(2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, IN)), jnp.bfloat16)
    found = second_layer(x, arrays, jnp.array([16, 16], jnp.int32), False)
    exact = np.concatenate([np.asarray(x[i : i + 16], np.float64) @ matrices[i // 16].T for i in (0, 16)])
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8, atol=1e-5 * np.abs(exact).max())


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


@pytest.mark.parametrize(
    ("name", "shape", "devices"),
    [("v5p-64chips", "v5p:2x2x1", 4), ("v6e-128chips", "v6e:2x2", 4), ("tpu7x-16chips", "tpu7x:2x2x1", 8)],
)
def test_compiled_for_tpu(name, shape, devices):
    """K3's experts on a device of 64: Mosaic takes the kernel, and no stack of weights is copied for it."""
    hint = topology.missing_compiler("tpu")
    if hint is not None:
        pytest.skip(hint)
    pod = Pod.from_file(name)
    few = {**pod.mesh, "data": 1, "tensor": devices}
    pod = dataclasses.replace(pod, topology=shape, chips=4, devices=devices, mesh=few)
    mesh = Mesh(topology.pod_mesh(pod).devices.reshape(-1)[:1], ("x",))
    whole = PartitionSpec()

    def argument(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, whole))

    def product(rows, packed, scale, layer, sizes, transposed):
        weights = {"weight_packed": packed, "weight_scale": scale, "layer": layer}
        return kernel_product(rows, weights, sizes, transposed=transposed)

    packed, scale = argument((22, 14, 3072, 1792), jnp.uint8), argument((22, 14, 3072, 112), jnp.uint8)
    for transposed, rows in ((False, 32), (True, 2048)):
        form = partial(product, transposed=transposed)
        local = jax.shard_map(form, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        x = argument((rows, 3072 if transposed else 3584), jnp.bfloat16)
        compiled = jax.jit(local).lower(x, packed, scale, argument((), jnp.int32), argument((14,), jnp.int32)).compile()
        assert "tpu_custom_call" in compiled.as_text()
        assert compiled.memory_analysis().temp_size_in_bytes < 6 * rows * 3584 * 2 + 2**21
