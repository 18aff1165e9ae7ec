"""Expert parallelism: each device applies the experts it holds, inside `shard_map`.

Two exact strategies, neither of which drops anything. With M rows in all, n devices, A experts a row, L numbers a row:

- `gather`: every row goes to every device, which applies its own experts to it; sums go back. A device moves about
  M·L numbers in and M·L float32 sums out.
- `dispatch`: a row's copies go to the devices that hold its experts, the results come back and are summed where the row
  lives, in the order of its experts. A device moves about M/n·A·L numbers out and as many float32 back. Receive buffers
  are bounded; the exchange takes as many rounds as the device with the most rows needs.

`auto` compares the two: `dispatch` where n > A and every device has a row, otherwise `gather` (with A = 16: up to 16
devices, and for the few rows of a small decode step).
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from kimi_jax.ops.grouped_matmul import num_experts as held_experts
from kimi_jax.ops.routed_experts import copies_of, put_back, sorted_copies
from kimi_jax.parallel.ragged import exchange
from kimi_jax.parallel.sharding import TABLE, active_mesh, active_strategy, divided

STRATEGIES = ("auto", "gather", "dispatch")
RECEIVE_FACTOR = 2
"""Rows of a receive buffer, in mean loads of a device."""

Experts = Mapping[str, Mapping[str, Array]]
LocalExperts = Callable[[Array, Array, Array, Experts, Array | int], Array]


def expert_parallel(
    apply: LocalExperts,
    z: Float[Array, "B T L"],
    index: Int[Array, "B T A"],
    weight: Float[Array, "B T A"],
    experts: Experts,
    num_experts: int,
) -> Float[Array, "B T L"]:
    """Weighted sum of the chosen experts' outputs, with the experts spread over all devices.

    **Arguments:**

    - `apply`: `apply(rows, index, weight, experts, first_expert)` for the experts held by one device; experts
        elsewhere contribute nothing.
    - `z`, `index`, `weight`: rows over "batch" and, where it divides, "tokens"; chosen experts and weights. An index of
        `num_experts` goes nowhere: padding is neither sent nor counted.
    - `experts`: stacked projections, split over the expert axis, which is the third from the end; numbers beside them
        go along as they are.

    **Returns:** float32 sums at least, laid out as `z`.
    """
    mesh = active_mesh()
    if mesh is None or mesh.size == 1:
        rows, chosen, share = (x.reshape((-1, x.shape[-1])) for x in (z, index, weight))
        return apply(rows, chosen, share, experts, 0).reshape(z.shape)
    tokens = TABLE["tokens"] if divided("tokens", z.shape[1]) else None
    split = TABLE["batch"] + (tokens or ())
    strategy = active_strategy()
    if strategy == "auto":
        strategy = choose_strategy(z.shape[0] * z.shape[1], mesh.size, index.shape[-1])
    move = (
        partial(_dispatch, mesh=mesh, split=split, num_experts=num_experts)
        if strategy == "dispatch"
        else partial(_gather, split=split)
    )

    def local(z: Array, index: Array, weight: Array, experts: Experts) -> Array:
        rows, chosen, share = (x.reshape((-1, x.shape[-1])) for x in (z, index, weight))
        return move(apply, rows, chosen, share, experts).reshape((*z.shape[:2], -1))

    by_row = PartitionSpec(TABLE["batch"], tokens)
    by_owner = jax.tree.map(lambda x: _owned(x.ndim), experts)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(by_row, by_row, by_row, by_owner), out_specs=by_row, check_vma=False
    )(z, index.astype(jnp.int32), weight, experts)


def _owned(ndim: int) -> PartitionSpec:
    return PartitionSpec() if ndim < 3 else PartitionSpec(*(None,) * (ndim - 3), TABLE["experts"])


def choose_strategy(rows: int, devices: int, per_row: int) -> str:
    """What `auto` means for so many rows in all, devices, and experts a row."""
    return "dispatch" if devices > per_row and rows >= devices else "gather"


def _gather(
    apply: LocalExperts, z: Array, index: Array, weight: Array, experts: Experts, *, split: tuple[str, ...]
) -> Array:
    owners = TABLE["experts"]
    first = jax.lax.axis_index(owners) * held_experts(experts["w1"])
    # Out: the latents, choices and weights of every shard to every other. M·(L·bytes + A·8) a device.
    z, index, weight = (jax.lax.all_gather(x, split, axis=0, tiled=True) for x in (z, index, weight))
    part = apply(z, index, weight, experts, first)
    # Back: sums over the devices' experts, each shard keeping its own rows. M·L·4 bytes a device.
    part = jax.lax.psum_scatter(part, split, scatter_dimension=0, tiled=True)
    return jax.lax.psum(part, tuple(axis for axis in owners if axis not in split))


def _dispatch(
    apply: LocalExperts,
    z: Array,
    index: Array,
    weight: Array,
    experts: Experts,
    *,
    mesh: Mesh,
    split: tuple[str, ...],
    num_experts: int,
) -> Array:
    owners = TABLE["experts"]
    sharers = tuple(axis for axis in owners if axis not in split)  # devices that hold the same rows share them out
    ways = math.prod(mesh.shape[axis] for axis in sharers)
    rows, per_row = index.shape
    share = -(-rows // ways)
    mine = jax.lax.axis_index(sharers) * share if sharers else 0
    pad = [(0, share * ways - rows), (0, 0)]
    z = jax.lax.dynamic_slice_in_dim(jnp.pad(z, pad), mine, share)
    index = jax.lax.dynamic_slice_in_dim(jnp.pad(index, pad, constant_values=num_experts), mine, share)
    weight = jax.lax.dynamic_slice_in_dim(jnp.pad(weight, pad), mine, share)

    held = num_experts // mesh.size
    experts_of = index.reshape(-1)
    order, back = sorted_copies(experts_of)  # by expert, hence by device; padding last
    sorted_experts = experts_of[order]
    copies = copies_of(per_row, z, order, back)
    counts = jnp.bincount(jax.lax.div(experts_of, jnp.asarray(held, experts_of.dtype)), length=mesh.size + 1)[:-1]
    capacity = max(8, -(-RECEIVE_FACTOR * share * per_row // 8) * 8)

    def serve(experts: Experts, rows: Array, chosen: Array) -> Array:
        first = jax.lax.axis_index(owners) * held
        ones = jnp.ones((rows.shape[0], 1), weight.dtype)
        return apply(rows, chosen[:, None], ones, experts, first)

    native = mesh.devices.flat[0].platform != "cpu"
    counts = counts.astype(jnp.int32)
    done = exchange(serve, experts, copies, sorted_experts, counts, capacity, num_experts, owners, native)
    parts = put_back(done, order, back).reshape((share, per_row, -1))
    out = jnp.sum(parts * weight.astype(parts.dtype)[..., None], axis=1)
    if sharers:
        # The rows of the devices that shared them out: M·L·4 bytes over the size of `split`.
        out = jax.lax.all_gather(out, sharers, axis=0, tiled=True)
    return out[:rows]
