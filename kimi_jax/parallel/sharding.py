"""The one table from logical axes to mesh axes, and the only maker of shardings.

Parameters, caches and activations name their axes logically ("heads", "vocab", …); what lies over which mesh
axis is decided here. An entry of an array's axes is a name, a name with a number of parts — `("heads", 96)`: the
dimension is made of 96 equal pieces that may not be cut — or None for an axis that is never split.
"""

import math
from collections.abc import Sequence
from contextvars import ContextVar
from types import TracebackType

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

from kimi_jax.ops.tpu import lies_positions_innermost
from kimi_jax.parallel.mesh import MeshError

Axis = str | tuple[str, int] | None
Axes = tuple[Axis, ...]

TABLE: dict[str, tuple[str, ...]] = {
    "batch": ("data",),  # rows of the batch, of caches too
    "tokens": ("context",),  # the tokens of one call, where their number divides
    "positions": ("context",),  # the positions of the latent cache
    "heads": ("tensor",),  # attention heads, in weights, activations and states
    "ffn": ("tensor",),  # hidden widths of the dense MLP and of the shared experts
    "latent": ("tensor",),  # the width that the routed experts read and write, in the projections around them
    "router": ("tensor",),  # rows of the router, one an expert
    "vocab": ("tensor",),  # rows of the embedding and of the head
    "experts": ("data", "context", "tensor"),  # routed experts lie over all devices
}


def partition_spec(array: str, shape: Sequence[int], axes: Axes, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The `PartitionSpec` of an array by the table.

    **Arguments:**

    - `array`: its name, for errors.
    - `shape`, `axes`: its sizes and logical axes, one of each a dimension.

    **Raises:** `MeshError` naming the array, the axis and both numbers where a size does not divide, or where one
    mesh axis would be used twice.
    """
    if len(shape) != len(axes):
        raise MeshError(f"{array} has {len(shape)} dimensions, but {len(axes)} logical axes are declared")
    spec: list[tuple[str, ...] | str | None] = []
    used: set[str] = set()
    for size, axis in zip(shape, axes, strict=True):
        name, parts = axis if isinstance(axis, tuple) else (axis, size)
        mesh_axes = tuple(a for a in TABLE[name] if mesh.shape[a] > 1) if name is not None else ()
        ways = math.prod(mesh.shape[a] for a in mesh_axes)
        over = "×".join(mesh_axes)
        if parts % ways:
            raise MeshError(
                f"{array}: axis {name!r} of {parts} cannot be split over mesh axis {over!r} of {ways}: "
                f"{ways} does not divide {parts}"
            )
        twice = used.intersection(mesh_axes)
        if twice:
            raise MeshError(f"{array}: mesh axis {twice.pop()!r} would split two dimensions of {tuple(shape)}")
        used.update(mesh_axes)
        spec.append(None if not mesh_axes else mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes)
    return PartitionSpec(*spec)


def array_sharding(
    array: str, shape: Sequence[int], axes: Axes, mesh: Mesh | None
) -> NamedSharding | SingleDeviceSharding:
    """Where an array lies: by the table on a mesh, on the first device without one."""
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, partition_spec(array, shape, axes, mesh))


_ACTIVE: ContextVar[Mesh | None] = ContextVar("kimi_jax_mesh", default=None)


_STRATEGY: ContextVar[str] = ContextVar("kimi_jax_expert_strategy", default="auto")


class on_mesh:  # noqa: N801 (used as a verb: `with on_mesh(mesh):`)
    """Makes `mesh` the one that `constrain` refers to while a function is traced.

    `strategy`: how expert parallelism moves rows, see `kimi_jax.parallel.expert_parallel`.
    """

    def __init__(self, mesh: Mesh | None, strategy: str = "auto") -> None:
        self.mesh, self.strategy = mesh, strategy

    def __enter__(self) -> None:
        self.token = _ACTIVE.set(self.mesh)
        self.strategy_token = _STRATEGY.set(self.strategy)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ACTIVE.reset(self.token)
        _STRATEGY.reset(self.strategy_token)


def active_mesh() -> Mesh | None:
    """The mesh that the function being traced will run on."""
    return _ACTIVE.get()


def active_strategy() -> str:
    """The expert strategy of the function being traced."""
    return _STRATEGY.get()


def divided(axis: str, size: int) -> str | None:
    """`axis` where the active mesh divides a dimension of `size` along it into more than one part, otherwise None."""
    mesh = active_mesh()
    ways = 1 if mesh is None else math.prod(mesh.shape[a] for a in TABLE[axis])
    return axis if ways > 1 and size % ways == 0 else None


def constrain(array: str, x: Array, axes: Axes) -> Array:
    """`x` with its sharding fixed by the table; unchanged without a mesh."""
    mesh = active_mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, array_sharding(array, x.shape, axes, mesh))


def positions_innermost(cached: Array) -> Array:
    """`[…, S, X]`, a latent cache, laid out on TPU with S innermost: as a function's arguments lie there.

    That is so where `lies_positions_innermost` says so. Unless told, the compiler lays the cache out another way inside
    loops, and copies all of it on the way in and out.
    """
    mesh = active_mesh()
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform != "tpu" or not lies_positions_innermost(*cached.shape[-2:]):
        return cached
    *outer, positions, width = range(cached.ndim)
    return with_layout_constraint(cached, Layout((*outer, width, positions)))
