"""Compiling for one device of a machine that is not there."""

import dataclasses
import tempfile
from pathlib import Path

import jax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.planning import topology
from kimi_jax.planning.pods import Pod

ON_TPUS = pytest.mark.parametrize(
    ("name", "shape", "devices"),
    [("v5p-64chips", "v5p:2x2x1", 4), ("v6e-128chips", "v6e:2x2", 4), ("tpu7x-16chips", "tpu7x:2x2x1", 8)],
)


def small_tpu(name, shape, devices):
    """The pod cut down to four chips; skips where no TPU compiler is installed."""
    hint = topology.missing_compiler("tpu")
    if hint is not None:
        pytest.skip(hint)
    pod = Pod.from_file(name)
    few = {**pod.mesh, "data": 1, "tensor": devices}
    return dataclasses.replace(pod, topology=shape, chips=4, devices=devices, mesh=few)


def compiled_for(pod, function, *arguments):
    """`function` compiled for one device of the pod, of arguments given by shape and dtype."""
    mesh = Mesh(topology.pod_mesh(pod).devices.reshape(-1)[:1], ("x",))
    whole = PartitionSpec()
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, whole)) for shape, dtype in arguments]
    local = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))
    with tempfile.TemporaryDirectory() as dump:
        return local.lower(*structs).compile(compiler_options=topology.compiler_options(pod, Path(dump)))
