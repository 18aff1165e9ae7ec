import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.parallel.mesh import MeshError, make_mesh
from kimi_jax.parallel.sharding import active_mesh, array_sharding, constrain, on_mesh, partition_spec

DATA2_TENSOR2, TENSOR4, DATA8 = {"data": 2, "tensor": 2}, {"tensor": 4}, {"data": 8}
ALL2 = {"data": 2, "context": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("mesh", "shape", "axes", "spec"),
    [
        (DATA2_TENSOR2, (4, 7, 6, 5), ("batch", None, "heads", None), P("data", None, "tensor", None)),
        (DATA2_TENSOR2, (12, 64, 32), ("experts", None, None), P(("data", "tensor"), None, None)),
        (ALL2, (16, 64, 32), ("experts", None, None), P(("data", "context", "tensor"), None, None)),
        (ALL2, (4, 64, 32), ("batch", "positions", None), P("data", "context", None)),
        (ALL2, (4, 64, 8, 32), ("batch", "tokens", "heads", None), P("data", "context", "tensor", None)),
        (TENSOR4, (12, 64, 32), ("experts", None, None), P("tensor", None, None)),
        (DATA8, (16, 64, 32), ("experts", None, None), P("data", None, None)),
        (TENSOR4, (256, 64), ("vocab", None), P("tensor", None)),
        (TENSOR4, (64, 256), (None, "ffn"), P(None, "tensor")),
        (TENSOR4, (12288, 7168), (("heads", 96), None), P("tensor", None)),
        (DATA8, (3, 7), ("heads", "vocab"), P(None, None)),  # nothing lies over data: any size goes
        (TENSOR4, (3, 7), ("batch", None), P(None, None)),
        ({"data": 1}, (3, 7), ("experts", "heads"), P(None, None)),
        (DATA2_TENSOR2, (), (), P()),
    ],
)
def test_the_table_decides(mesh, shape, axes, spec):
    assert partition_spec("x", shape, axes, make_mesh(mesh)) == spec


@pytest.mark.parametrize(
    ("mesh", "shape", "axes", "message"),
    [
        (
            TENSOR4, (6, 5), ("heads", None),
            "layers.3.A_log: axis 'heads' of 6 cannot be split over mesh axis 'tensor' of 4: 4 does not divide 6",
        ),
        (
            TENSOR4, (48, 64), (("heads", 3), None),  # 48 = 3 heads of 16: 4 divides 48, but would cut heads
            "layers.3.A_log: axis 'heads' of 3 cannot be split over mesh axis 'tensor' of 4: 4 does not divide 3",
        ),
        (
            DATA2_TENSOR2, (6, 5, 5), ("experts", None, None),
            "layers.3.A_log: axis 'experts' of 6 cannot be split over mesh axis 'data×tensor' of 4: "
            "4 does not divide 6",
        ),
        (
            {"context": 4}, (2, 198, 5), ("batch", "positions", None),
            "layers.3.A_log: axis 'positions' of 198 cannot be split over mesh axis 'context' of 4: "
            "4 does not divide 198",
        ),
        (DATA8, (4, 5), ("batch", None), "axis 'batch' of 4 cannot be split over mesh axis 'data' of 8"),
        (TENSOR4, (8, 8), ("heads", "ffn"), "layers.3.A_log: mesh axis 'tensor' would split two dimensions of (8, 8)"),
        (
            DATA2_TENSOR2, (4, 4, 2), ("experts", None, "batch"),
            "layers.3.A_log: mesh axis 'data' would split two dimensions of (4, 4, 2)",
        ),
        (TENSOR4, (8, 8), ("heads",), "layers.3.A_log has 2 dimensions, but 1 logical axes are declared"),
    ],
)  # fmt: skip
def test_arrays_that_cannot_be_split(mesh, shape, axes, message):
    with pytest.raises(MeshError, match=re.escape(message)):
        partition_spec("layers.3.A_log", shape, axes, make_mesh(mesh))


def test_array_sharding():
    mesh = make_mesh(TENSOR4)
    assert array_sharding("x", (8, 3), ("heads", None), mesh) == NamedSharding(mesh, P("tensor", None))
    assert array_sharding("x", (8, 3), ("heads", None), None) == SingleDeviceSharding(jax.devices()[0])


def test_the_active_mesh_is_the_innermost_and_ends_with_its_block():
    outer, inner = make_mesh(DATA8), make_mesh(TENSOR4)
    assert active_mesh() is None
    with on_mesh(outer):
        with pytest.raises(ZeroDivisionError), on_mesh(inner):
            raise ZeroDivisionError
        assert active_mesh() is outer
        with on_mesh(None):
            assert active_mesh() is None
        with on_mesh(inner):
            assert active_mesh() is inner
    assert active_mesh() is None


def test_constrain():
    x = jnp.zeros((8, 3))
    assert constrain("x", x, ("heads", None)) is x
    mesh = make_mesh(TENSOR4)
    with on_mesh(mesh):
        y = jax.jit(lambda x: constrain("x", x + 1, ("heads", None)))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("tensor", None)), 2)
    assert {shard.data.shape for shard in y.addressable_shards} == {(2, 3)}
