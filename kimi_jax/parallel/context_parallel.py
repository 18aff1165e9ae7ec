"""One sequence over several devices: the latent cache by positions, a prompt by tokens; inside `shard_map`.

What is local to a token is split by the compiler along "tokens". Two things are not, and stand here: attention over a
cache whose positions lie on several devices, and the KDA recurrence over tokens that do.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.parallel.sharding import TABLE, Axes, active_mesh, divided, partition_spec

CONTEXT = "context"


def over_positions(
    attend: Callable[..., Array], arrays: dict[str, Any], axes: dict[str, Axes], capacity: int, out: Axes
) -> Array:
    """Attention with heads over `tensor` and the cache's positions over `context`.

    Each device attends to the positions it holds with its part of the heads; where there are several parts, peaks, sums
    and mixed values are then merged exactly.

    **Arguments:**

    - `attend`: `attend(first, combine, gather, **arrays)`: `first` is the first position held, `combine` merges a
        partial softmax over the devices (None: nothing to merge), `gather` puts the devices' candidates side by side.
    - `arrays`, `axes`: what it reads, and the logical axes of each.
    - `capacity`: positions of the cache. `out`: logical axes of the result.
    """
    mesh = active_mesh()
    if mesh is None or capacity % mesh.shape[CONTEXT]:
        return attend(0, None, None, **arrays)
    split, share = mesh.shape[CONTEXT] > 1, capacity // mesh.shape[CONTEXT]
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}

    def combine(peak: Array, total: Array, mixed: Array) -> tuple[Array, Array, Array]:
        # Over `context`: B·T·N·(V + 2) numbers of the device's heads, summed. Nothing depends on what is subtracted.
        highest = jax.lax.pmax(jax.lax.stop_gradient(peak), CONTEXT)
        fade = jnp.where(jnp.isneginf(peak), 0, jnp.exp(peak - highest))
        total = jax.lax.psum(total * fade, CONTEXT)
        return highest, total, jax.lax.psum(mixed * fade[..., None], CONTEXT)

    def gather(x: Array) -> Array:
        # Over `context`: the candidates of each token, B·T·J numbers a device.
        return jax.lax.all_gather(x, CONTEXT, axis=x.ndim - 1, tiled=True)

    def local(arrays: dict[str, Any]) -> Array:
        if not split:
            return attend(0, None, None, **arrays)
        return attend(jax.lax.axis_index(CONTEXT) * share, combine, gather, **arrays)

    def spec(name: str, shape: tuple[int, ...], axes: Axes) -> PartitionSpec:
        return partition_spec(f"attention {name}", shape, axes, mesh)

    specs = {name: spec(name, x.shape, axes[name]) for name, x in arrays.items()}
    result = PartitionSpec(*(TABLE[a if isinstance(a, str) else a[0]] if a is not None else None for a in out))
    return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=result, check_vma=False)(arrays)


def write_positions(
    write: Callable[..., Array],
    buffer: Float[Array, "*G B S X"],
    new: Float[Array, "B T X"],
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "*G B S X"]:
    """`write(buffer, new, positions, real, layer)` with the buffer's rows over `data`, its positions over `context`.

    Each device keeps the entries that fall into its part. Moved: the call's new entries, to every device of `context`.
    """
    mesh = active_mesh()
    if mesh is None:
        return write(buffer, new, positions, real, layer)
    split = divided("positions", buffer.shape[-2])

    def local(buffer: Array, new: Array, positions: Array, real: Array, layer: Array | None) -> Array:
        first = 0 if split is None else jax.lax.axis_index(CONTEXT) * buffer.shape[-2]
        return write(buffer, new, positions - first, real, layer)

    rows = PartitionSpec(TABLE["batch"])
    held = PartitionSpec(*(None,) * (buffer.ndim - 3), TABLE["batch"], split and TABLE[split])
    number = None if layer is None else PartitionSpec()
    return jax.shard_map(local, mesh=mesh, in_specs=(held, rows, rows, rows, number), out_specs=held, check_vma=False)(
        buffer, new, positions, real, layer
    )


def over_tokens(
    recur: Callable[..., tuple[Array, Array]],
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T N V"],
    g: Float[Array, "B T N K"],
    beta: Float[Array, "B T N"],
    state: Float[Array, "B N K V"],
    begins: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    """`recur(q, k, v, g, beta, state, begins)`, a recurrence linear in the state, on each device's rows and heads.

    Where `context` divides the tokens they are split too. Over a device's tokens the recurrence is `S → A S + B`, and
    its outputs are linear in S too. One run with the values widened by K zeros, from the state `[0, I]`, gives outputs
    and state from zero on the left and the linear maps on the right. The devices then exchange A and B, N·K·(K + V)
    numbers of the device's heads each, and every device composes those of the tokens before its own, and of all for the
    state in the end. Where a document begins on a device its A is zero: `recur` sees to that.
    """
    mesh = active_mesh()
    if mesh is None:
        return recur(q, k, v, g, beta, state, begins)
    split = divided("tokens", q.shape[1])
    parts = mesh.shape[CONTEXT]

    def local(
        q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, begins: Array | None
    ) -> tuple[Array, Array]:
        width, keys = v.shape[-1], k.shape[-1]
        identity = jnp.broadcast_to(jnp.eye(keys, dtype=state.dtype), (*state.shape[:2], keys, keys))
        wide = jnp.concatenate([v, jnp.zeros((*v.shape[:3], keys), v.dtype)], axis=-1)
        out, after = recur(q, k, wide, g, beta, jnp.concatenate([jnp.zeros_like(state), identity], axis=-1), begins)
        steps = jax.lax.all_gather(after, CONTEXT)
        mine = jax.lax.axis_index(CONTEXT)
        before, end = state, state
        for part in range(parts):
            before = jnp.where(mine == part, end, before)
            end = _product("bnij,bnjv->bniv", steps[part, ..., width:], end) + steps[part, ..., :width]
        return out[..., :width] + _product("btnk,bnkv->btnv", out[..., width:], before), end

    rows, tokens, heads = TABLE["batch"], split and TABLE[split], TABLE["heads"]
    by_token, by_head = PartitionSpec(rows, tokens, heads), PartitionSpec(rows, heads)
    form = recur if split is None else local
    specs = (*[by_token] * 5, by_head, None if begins is None else PartitionSpec(rows, tokens))
    return jax.shard_map(form, mesh=mesh, in_specs=specs, out_specs=(by_token, by_head), check_vma=False)(
        q, k, v, g, beta, state, begins
    )


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)
