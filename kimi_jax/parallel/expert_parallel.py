"""Expert parallelism: each device applies the experts it holds, inside `shard_map`."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from kimi_jax.parallel.sharding import TABLE, active_mesh

LocalExperts = Callable[[Array, Array, Array, Mapping[str, Mapping[str, Array]], Array | int], Array]


def expert_parallel(
    apply: LocalExperts,
    z: Float[Array, "M L"],
    index: Int[Array, "M A"],
    weight: Float[Array, "M A"],
    experts: Mapping[str, Mapping[str, Array]],
) -> Float[Array, "M L"]:
    """Weighted sum of the chosen experts' outputs, with the experts spread over all devices.

    **Arguments:**

    - `apply`: `apply(z, index, weight, experts, first_expert)` for the experts held by one device; experts
        elsewhere contribute nothing.
    - `z`, `index`, `weight`: rows over `data` (the batch axis), chosen experts and weights.
    - `experts`: stacked projections, split over the expert axis.

    **Returns:** float32 sums, rows over `data`. Every row reaches every device: no capacity, nothing dropped.
    """
    mesh = active_mesh()
    if mesh is None or mesh.size == 1:
        return apply(z, index, weight, experts, 0)
    rows, owners = TABLE["batch"], TABLE["experts"]

    def local(z: Array, index: Array, weight: Array, experts: Mapping[str, Mapping[str, Array]]) -> Array:
        held = jax.tree.leaves(experts)[0].shape[0]
        first = jax.lax.axis_index(owners) * held
        # Out: the latents, choices and weights of every data shard to every other. M·(L·bytes + A·8) a device.
        z, index, weight = (jax.lax.all_gather(x, rows, axis=0, tiled=True) for x in (z, index, weight))
        part = apply(z, index, weight, experts, first)
        # Back: sums over the devices' experts, each data shard keeping its own rows. M·L·4 bytes a device.
        part = jax.lax.psum_scatter(part, rows, scatter_dimension=0, tiled=True)
        return jax.lax.psum(part, tuple(axis for axis in owners if axis not in rows))

    by_row = PartitionSpec(rows)
    by_owner = jax.tree.map(lambda _: PartitionSpec(owners), experts)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(by_row, by_row, by_row, by_owner), out_specs=by_row, check_vma=False
    )(z, index.astype(jnp.int32), weight, experts)
