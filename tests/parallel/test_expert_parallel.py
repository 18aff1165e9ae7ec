from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.activations import situ
from kimi_jax.ops.routed_experts import routed_experts
from kimi_jax.parallel.expert_parallel import expert_parallel
from kimi_jax.parallel.mesh import make_mesh
from kimi_jax.parallel.sharding import on_mesh

EXPERTS, LATENT, WIDTH, CHOSEN = 16, 32, 32, 3
MESHES = {
    "data8": {"data": 8},
    "tensor4": {"tensor": 4},
    "data2-tensor2": {"data": 2, "tensor": 2},
}


@pytest.fixture(scope="module")
def experts():
    """Packed, so that bytes and scales are split alike. Every expert is different."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (WIDTH, LATENT), "w3": (WIDTH, LATENT), "w2": (LATENT, WIDTH)}
    return {
        name: {
            "weight_packed": rng.integers(0, 256, (EXPERTS, out, into // 2)).astype(np.uint8),
            "weight_scale": rng.integers(122, 126, (EXPERTS, out, into // 32)).astype(np.uint8),
        }
        for name, (out, into) in shapes.items()
    }


apply = partial(routed_experts, activate=partial(situ, beta=4.0, linear_beta=25.0))
on_one_device = jax.jit(partial(apply, first_expert=0))


@pytest.fixture(scope="module", params=MESHES)
def on_many_devices(request):
    mesh = make_mesh(MESHES[request.param])
    spread = jax.jit(partial(expert_parallel, apply))

    def call(*arguments):
        with on_mesh(mesh):
            return spread(*arguments)

    return call


def random_tokens(count):
    rng = np.random.default_rng(count)
    index = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(count)]).astype(np.int32)
    weight = rng.uniform(0.1, 1, (count, CHOSEN)).astype(np.float32)
    return rng.normal(size=(count, LATENT)).astype(np.float32), index, weight


def assert_equal_to_one_device(on_many_devices, *arguments):
    wanted = on_one_device(*arguments)
    assert jnp.abs(wanted).max() > 0.1
    found = on_many_devices(*arguments)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * float(jnp.abs(wanted).max()))


def test_equals_one_device(on_many_devices, experts):
    assert_equal_to_one_device(on_many_devices, *random_tokens(24), experts)


@pytest.mark.parametrize("expert", [0, 5, EXPERTS - 1])
def test_all_tokens_to_one_expert(on_many_devices, experts, expert):
    """No capacity: nothing is dropped, and all devices but one have nothing to do."""
    z, index, weight = random_tokens(24)
    assert_equal_to_one_device(on_many_devices, z, np.full_like(index, expert), weight, experts)


def test_devices_without_a_token(on_many_devices, experts):
    """Only the experts of the second half are chosen."""
    z, index, weight = random_tokens(24)
    assert_equal_to_one_device(on_many_devices, z, EXPERTS // 2 + index % (EXPERTS // 2), weight, experts)


def test_fewer_tokens_than_devices(on_many_devices, experts):
    """One row a device, three of them real; padding carries the number of experts, and NaN must not leak."""
    z, index, weight = random_tokens(8)
    index[[0, 2, 4, 6, 7]] = EXPERTS
    z[[0, 2, 4, 6, 7]] = np.nan
    assert_equal_to_one_device(on_many_devices, z, index, weight, experts)
    found = np.asarray(on_many_devices(z, index, weight, experts))
    np.testing.assert_array_equal(found[[0, 2, 4, 6, 7]], 0)


@pytest.mark.parametrize("mesh", [{"tensor": 4}, {"data": 1}], ids=str)
def test_a_single_token(experts, mesh):
    """Rows need not divide over the tensor axis."""
    with on_mesh(make_mesh(mesh)):
        assert_equal_to_one_device(jax.jit(partial(expert_parallel, apply)), *random_tokens(1), experts)
