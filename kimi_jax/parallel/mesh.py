"""Device meshes by name."""

import contextlib
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

MESH_AXES = ("data", "context", "tensor")
"""Every mesh has these axes, some of size 1; what lies over which stands in `parallel/sharding.py`."""


class MeshError(ValueError):
    """A mesh that cannot be made, or that does not divide an array."""


def make_mesh(shape: Mapping[str, int | np.integer] | None) -> Mesh | None:
    """A mesh over the first product-many devices of this job.

    **Arguments:**

    - `shape`: sizes by axis name, e.g. `{"data": 2, "tensor": 4}`; an axis left out has size 1. None means one
        device without a mesh.

    **Raises:** `MeshError` for an unknown axis, a size below 1, or more devices than there are.
    """
    if shape is None:
        return None
    for name, size in shape.items():
        if name not in MESH_AXES:
            raise MeshError(f"unknown mesh axis {name!r}; the axes are {', '.join(MESH_AXES)}")
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise MeshError(f"mesh axis {name!r} must be a whole number of at least 1, found {size!r}")
    sizes = tuple(int(shape.get(name, 1)) for name in MESH_AXES)
    devices = jax.devices()
    wanted = math.prod(sizes)
    if wanted > len(devices):
        product = " × ".join(f"{name}={size}" for name, size in zip(MESH_AXES, sizes, strict=True))
        raise MeshError(f"mesh {product} needs {wanted} devices, this job has {len(devices)}")
    grid = mesh_utils.create_device_mesh(sizes, devices[:wanted], allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def parse_mesh(text: str | None) -> dict[str, int] | None:
    """`"data=2,tensor=4"` as a mapping for `make_mesh`; None and `"none"` mean no mesh."""
    if text is None or text.strip().lower() in ("", "none"):
        return None
    shape: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not name.strip() or not size.strip().isdecimal() or name.strip() in shape:
            raise MeshError(f"cannot read mesh {text!r}; write it as data=2,tensor=4")
        shape[name.strip()] = int(size)
    return shape


def ask_for_cpu_devices(count: int) -> None:
    """Makes the CPU backend offer `count` devices, where it has not started yet; other backends do not care."""
    with contextlib.suppress(RuntimeError):  # started: it keeps the devices it has
        jax.config.update("jax_num_cpu_devices", max(1, count))


def check_mesh(mesh: Mesh | None) -> None:
    """Refuses what `make_mesh` would not have made."""
    if mesh is not None and (not isinstance(mesh, Mesh) or tuple(mesh.axis_names) != MESH_AXES):
        raise MeshError(f"a mesh with the axes {', '.join(MESH_AXES)} is wanted (make_mesh makes one), found {mesh!r}")


def axis_size(mesh: Mesh | None, name: str) -> int:
    """Size of a mesh axis; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[name]
