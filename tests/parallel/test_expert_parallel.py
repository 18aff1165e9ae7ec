from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from kimi_jax.ops.activations import situ
from kimi_jax.ops.routed_experts import routed_experts
from kimi_jax.parallel.expert_parallel import choose_strategy, expert_parallel
from kimi_jax.parallel.mesh import make_mesh
from kimi_jax.parallel.ragged import exchange
from kimi_jax.parallel.sharding import on_mesh

EXPERTS, LATENT, WIDTH, CHOSEN = 16, 32, 32, 3
MESHES = {
    "data8": {"data": 8},
    "tensor4": {"tensor": 4},
    "all2": {"data": 2, "context": 2, "tensor": 2},
}
CASES = [(mesh, strategy) for mesh in MESHES for strategy in ("gather", "dispatch")]


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


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def on_many_devices(request):
    mesh, strategy = make_mesh(MESHES[request.param[0]]), request.param[1]
    spread = jax.jit(partial(expert_parallel, apply, num_experts=EXPERTS))

    def call(z, index, weight, experts):
        rows = (8, -1) if len(z) % 8 == 0 else (1, -1)  # of the batch; the rest are tokens of a row
        arrays = (x.reshape((*rows, x.shape[-1])) for x in (z, index, weight))
        with on_mesh(mesh, strategy):
            return spread(*arrays, experts).reshape(z.shape)

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
    assert_equal_to_one_device(on_many_devices, *random_tokens(32), experts)


@pytest.mark.parametrize("expert", [0, 5, EXPERTS - 1])
def test_all_tokens_to_one_expert(on_many_devices, experts, expert):
    """No capacity: nothing is dropped, and all devices but one have nothing to do."""
    z, index, weight = random_tokens(32)
    assert_equal_to_one_device(on_many_devices, z, np.full_like(index, expert), weight, experts)


def test_devices_without_a_token(on_many_devices, experts):
    """Only the experts of the second half are chosen."""
    z, index, weight = random_tokens(32)
    assert_equal_to_one_device(on_many_devices, z, EXPERTS // 2 + index % (EXPERTS // 2), weight, experts)


def test_fewer_tokens_than_devices(on_many_devices, experts):
    """One row a device, three of them real; padding carries the number of experts, and NaN must not leak."""
    z, index, weight = random_tokens(8)
    index[[0, 2, 4, 6, 7]] = EXPERTS
    z[[0, 2, 4, 6, 7]] = np.nan
    assert_equal_to_one_device(on_many_devices, z, index, weight, experts)
    found = np.asarray(on_many_devices(z, index, weight, experts))
    np.testing.assert_array_equal(found[[0, 2, 4, 6, 7]], 0)


def test_all_tokens_to_one_device(on_many_devices, experts):
    """The two experts of the first of eight devices: it receives everything, in several rounds."""
    z, index, weight = random_tokens(32)
    assert_equal_to_one_device(on_many_devices, z, index % 2, weight, experts)


@pytest.mark.parametrize("strategy", ["gather", "dispatch"])
@pytest.mark.parametrize("mesh", [{"tensor": 4}, {"data": 1}], ids=str)
def test_a_single_token(experts, mesh, strategy):
    """Rows need not divide over the tensor axis."""

    def call(z, index, weight, experts):
        with on_mesh(make_mesh(mesh), strategy):
            return jax.jit(partial(expert_parallel, apply, num_experts=EXPERTS))(
                z[None], index[None], weight[None], experts
            )[0]

    assert_equal_to_one_device(call, *random_tokens(1), experts)


@pytest.mark.parametrize(
    ("rows", "devices", "strategy"),
    [(4096, 8, "gather"), (4096, 16, "gather"), (4096, 64, "dispatch"), (32, 64, "gather"), (64, 64, "dispatch")],
)
def test_auto(rows, devices, strategy):
    assert choose_strategy(rows, devices, per_row=16) == strategy


def test_rounds_move_every_row_to_its_place_and_back():
    """Rows tagged by sender and number; each device answers with its own number and what it was given."""
    mesh, devices, rows, capacity = make_mesh({"data": 4}), 4, 12, 4
    rng = np.random.default_rng(0)
    for case in range(3):
        target = np.sort(rng.integers(0, devices + 1, (devices, rows)), axis=1)  # devices: stays
        if case == 1:
            target[:] = 3  # 48 rows for one device, 12 rounds
        counts = np.stack([np.bincount(t, minlength=devices + 1)[:devices] for t in target]).astype(np.int32)
        values = (1 + np.arange(devices * rows, dtype=np.float32)).reshape((devices, rows, 1))
        tags = np.where(target < devices, np.arange(rows), 99).astype(np.int32)

        def local(values, tags, counts):
            def serve(thousand, rows, tags):
                mine = thousand * (1 + jax.lax.axis_index("data")).astype(rows.dtype)
                return jnp.where(tags[:, None] == 99, 0, mine + rows)

            thousand = jnp.float32(1000)
            return exchange(serve, thousand, values[0], tags[0], counts[0], capacity, 99, ("data",), False)[None]

        spec = PartitionSpec("data")
        found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False))(
            values, tags, counts
        )
        wanted = np.where(target[..., None] < devices, 1000.0 * (1 + target[..., None]) + values, 0)
        np.testing.assert_array_equal(found, wanted)
