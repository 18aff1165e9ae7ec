"""How the full K3 lies on three pods, against a committed file: a change of the table or of an array's axes is seen.

KIMI_WRITE_SHARDINGS=1 python -m pytest tests/planning/test_shardings.py   # after a change that is meant
"""

import os
import re
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import cache_layout
from kimi_jax.model.model import abstract_params
from kimi_jax.parallel.mesh import MESH_AXES
from kimi_jax.parallel.sharding import partition_spec
from kimi_jax.planning.pods import Pod

COMMITTED = Path(__file__).parent / "shardings-kimi-k3.txt"
PODS = ("v5p-64chips", "tpu7x-16chips", "h200-16")


def described(pod):
    """A line for each kind of array: name without layer, shape, where each dimension lies."""
    config = ModelConfig.from_file("kimi-k3")
    mesh = AbstractMesh(tuple(pod.mesh.get(axis, 1) for axis in MESH_AXES), MESH_AXES)
    layout, axes = cache_layout(config, jnp.dtype(jnp.bfloat16), pod.batch, pod.context)
    arrays = [(name, struct.shape, axes) for name, (struct, axes) in abstract_params(config).items()]
    for layer in (layout.layers[0], layout.layers[3]):
        arrays += [
            (f"cache {field}", struct.shape, axes[field]) for field, struct in vars(layer).items() if struct is not None
        ]
    lines = {}
    for name, shape, axes in arrays:
        kind = re.sub(r"^layers\.\d+\.", "layers.*.", name)
        spec = partition_spec(name, shape, axes, mesh)
        parts = ["×".join(part) if isinstance(part, tuple) else part or "whole" for part in spec]
        lines[f"{kind} {list(shape)}: {', '.join(parts)}"] = None
    return [f"{dict(mesh.shape)}", *lines]


@pytest.mark.parametrize("name", PODS)
def test_shardings_are_the_committed_ones(name):
    pod = Pod.from_file(name)
    found = "\n".join([f"# {name}", *described(pod)]) + "\n"
    if os.environ.get("KIMI_WRITE_SHARDINGS"):
        old = COMMITTED.read_text() if COMMITTED.exists() and name != PODS[0] else ""
        COMMITTED.write_text(old + found)
    assert found in COMMITTED.read_text()
