"""Attention over cached latents (MLA without rotary embedding), in three forms that agree.

A cached entry is `[c, k_r]`: the kv latent (C numbers, after its norm) and the extra key width (R numbers, one
for all heads, unrotated). A head's key is `[W_k c, k_r]`, its value `W_v c`, the scale `(H + R)^-1/2` with
H the width of `W_k c`. Softmax in float32, blocks of the cache at a time with a running maximum, so that no
buffer grows with T·S and a cache is only read as far as it is filled.

- `prefill_attention` expands a block's keys and values for all heads: cheapest where many queries share them.
- `decode_attention` folds `W_k` into the query and `W_v` into the output and reads each latent once; on TPU by the
    kernel of `kimi_jax.ops.latent_kernel`.
- `sparse_attention` does the same over positions chosen for each token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ops.latent_kernel import fits_kernel, kernel_attention
from kimi_jax.ops.norms import wide_dtype

Combine = Callable[[Array, Array, Array], tuple[Array, Array, Array]]
KEY_BLOCK = 256
"""Cached positions handled at a time."""


def filled_blocks(length: Int[Array, ""] | int, capacity: int) -> Int[Array, ""] | int:
    """Blocks that hold the first `length` of `capacity` positions; `length` may be negative or larger."""
    block = min(KEY_BLOCK, capacity)
    if isinstance(length, int):
        return -(-min(max(length, 0), capacity) // block)
    return -(-jnp.clip(length, 0, capacity) // block)


def cached_positions(
    cached: Float[Array, "*G B S X"], start: Int[Array, ""] | int, size: int, layer: Int[Array, ""] | None = None
) -> Float[Array, "B J X"]:
    """The J = `size` positions from `start` on; of a stack of layers those of `layer`, cut out at once."""
    if layer is None:
        return jax.lax.dynamic_slice_in_dim(cached, start, size, axis=1)
    sizes = (1, cached.shape[1], size, cached.shape[3])
    return jax.lax.dynamic_slice(cached, (layer, *(jnp.asarray(i, layer.dtype) for i in (0, start, 0))), sizes)[0]


def widened(entries: Float[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """Cached entries in the compute dtype. The barrier keeps the compiler from converting all of the cache first."""
    return entries if entries.dtype == dtype else jax.lax.optimization_barrier(entries).astype(dtype)


def prefill_attention(
    q: Float[Array, "B T N HR"],
    latents: Float[Array, "*G B S CR"],
    w_key: Float[Array, "N H CA"],
    w_value: Float[Array, "N V CA"],
    positions: Int[Array, "B T"],
    num_blocks: Int[Array, ""] | int,
    combine: Combine | None = None,
    layer: Int[Array, ""] | None = None,
    since: Int[Array, "B T"] | None = None,
    down: Float[Array, "r C"] | None = None,
) -> Float[Array, "B T N V"]:
    """Attention with expanded keys and values.

    **Arguments:**

    - `q`: queries, the H numbers that meet `W_k c` first, then the R that meet `k_r`.
    - `latents`: cached entries, the call's own already among them.
    - `w_key`, `w_value`: the halves of `kv_b_proj`; CA is C, or C + r with an adapter.
    - `positions`: place of each query's own token in the cache; it sees the entries up to there.
    - `num_blocks`: from `filled_blocks`; a Python number makes the loop differentiable.
    - `combine`: where the entries lie on several devices, merges their softmaxes: from (peak, sum, mixed values) of
        the entries here to those of all. `positions` are then counted from the first entry here, and may be negative.
    - `layer`: where `latents` is a stack of several layers' entries, whose to read.
    - `since`: the first entry that each query sees, counted as `positions`. None: all entries up to its own.
    - `down`: the first half A of a low-rank adapter of `kv_b_proj`; `w_key` and `w_value` then have r columns more, and
        act on `[c, A c]`.
    """
    arrays = q, w_key.astype(q.dtype), w_value.astype(q.dtype), None if down is None else down.astype(q.dtype)
    if combine is None and layer is None and isinstance(num_blocks, int):
        return _prefill_alone(num_blocks, arrays, latents, positions, since)
    block = partial(_expanded, arrays)
    mix, width = "btns,bsnv->btnv", w_value.shape[1]
    state = _attend(latents, positions, num_blocks, block, mix, width, q, layer, since)
    return _finish(*state, combine).astype(q.dtype)


def latent_rank(w_key: Float[Array, "N H CA"], down: Float[Array, "r C"] | None) -> int:
    """Width C of the latents that `w_key` acts on, with those of an adapter's rank beside them where it has one."""
    return w_key.shape[-1] - (0 if down is None else down.shape[0])


def _expanded(arrays: tuple[Array, Array, Array, Array | None], entries: Array) -> tuple[Array, Array]:
    """Scaled scores `[B, T, N, J]` and values `[B, J, N, V]` of a block of entries, keys and values expanded."""
    q, w_key, w_value, down = arrays
    rank = latent_rank(w_key, down)
    latent, extra = _beside(entries[..., :rank], down), entries[..., rank:]
    key = jnp.einsum("bsc,nhc->bsnh", latent, w_key)
    shape = (*key.shape[:3], extra.shape[-1])
    key = jnp.concatenate([key, jnp.broadcast_to(extra[:, :, None, :], shape)], axis=-1)
    scores = _scores("btnk,bsnk->btns", q, key) * q.shape[-1] ** -0.5
    return scores, jnp.einsum("bsc,nvc->bsnv", latent, w_value)


def _beside(latent: Array, down: Array | None) -> Array:
    """`[c, A c]` of latents `[…, C]`."""
    if down is None:
        return latent
    return jnp.concatenate([latent, jnp.einsum("...c,rc->...r", latent, down.astype(latent.dtype))], axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _prefill_alone(
    num_blocks: int, arrays: tuple[Any, ...], latents: Array, positions: Array, since: Array | None
) -> Array:
    """Attention over all entries, which lie on this device; a backward pass computes the scores again."""
    return _prefill_forward(num_blocks, arrays, latents, positions, since)[0]


def _prefill_forward(
    num_blocks: int, arrays: tuple[Any, ...], latents: Array, positions: Array, since: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    q, mix = arrays[0], "btns,bsnv->btnv"
    block = partial(_expanded, arrays)
    peak, total, mixed = _attend(latents, positions, num_blocks, block, mix, arrays[2].shape[1], q, None, since)
    out = _finish(peak, total, mixed, None).astype(q.dtype)
    return out, (arrays, latents, positions, since, out, peak + jnp.log(total))


def _prefill_backward(num_blocks: int, residuals: tuple[Any, ...], gradient: Array) -> tuple[Any, ...]:
    """With p the shares, v the values and g the gradient: dv = pᵀg, and dscore = p·(g·v − g·out)."""
    arrays, latents, positions, since, out, log_total = residuals
    wide = log_total.dtype
    gradient = gradient.astype(wide)
    own = jnp.sum(gradient * out.astype(wide), axis=-1)

    def one_block(j: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        to_arrays, to_latents = carry
        start, seen = _block_bounds(j, latents.shape[-2], positions, since)
        entries = cached_positions(latents, start, seen.shape[-1])
        (scores, values), pull = jax.vjp(_expanded, arrays, entries)
        share = jnp.exp(jnp.where(seen[:, :, None, :], scores, -jnp.inf) - log_total[..., None])
        to_values = jnp.einsum("btns,btnv->bsnv", share, gradient)
        to_share = jnp.einsum("btnv,bsnv->btns", gradient, values.astype(wide))
        to_scores = share * (to_share - own[..., None])
        more, to_entries = pull((to_scores.astype(scores.dtype), to_values.astype(values.dtype)))
        before = cached_positions(to_latents, start, seen.shape[-1])
        to_latents = jax.lax.dynamic_update_slice_in_dim(to_latents, before + to_entries.astype(wide), start, axis=1)
        return jax.tree.map(lambda x, y: x + y.astype(wide), to_arrays, more), to_latents

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, wide), (arrays, latents))
    to_arrays, to_latents = jax.lax.fori_loop(0, num_blocks, one_block, zeros)
    to_arrays = jax.tree.map(lambda x, like: x.astype(like.dtype), to_arrays, arrays)
    return to_arrays, to_latents.astype(latents.dtype), None, None


_prefill_alone.defvjp(_prefill_forward, _prefill_backward)


def decode_attention(
    q: Float[Array, "B T N HR"],
    latents: Float[Array, "*G B S CR"],
    w_key: Float[Array, "N H CA"],
    w_value: Float[Array, "N V CA"],
    positions: Int[Array, "B T"],
    num_blocks: Int[Array, ""] | int,
    combine: Combine | None = None,
    layer: Int[Array, ""] | None = None,
    down: Float[Array, "r C"] | None = None,
) -> Float[Array, "B T N V"]:
    """Attention in the latent space: `(W_kᵀ q)·c` in place of `q·(W_k c)`. Arguments as `prefill_attention`."""
    rank = latent_rank(w_key, down)
    folded = fold_query(q, w_key, down)

    scale = q.shape[-1] ** -0.5

    def block(entries: Array) -> tuple[Array, Array]:
        return _scores("btnc,bsc->btns", folded, entries) * scale, entries[..., :rank]

    def loop() -> Array:
        state = _attend(latents, positions, num_blocks, block, "btns,bsc->btnc", rank, q, layer)
        return _finish(*state, combine).astype(q.dtype)

    def kernel() -> Array:
        peak, total, mixed = kernel_attention(folded[:, 0], latents, rank, positions[:, 0], scale, layer)
        return _finish(peak[:, None], total[:, None], mixed[:, None], combine).astype(q.dtype)

    mixed = jax.lax.platform_dependent(tpu=kernel, default=loop) if fits_kernel(q, latents, rank) else loop()
    return jnp.einsum("btnc,nvc->btnv", _beside(mixed, down), w_value.astype(mixed.dtype))


def sparse_attention(
    q: Float[Array, "B T N HR"],
    chosen: Float[Array, "B T J CR"],
    real: Bool[Array, "B T J"],
    w_key: Float[Array, "N H CA"],
    w_value: Float[Array, "N V CA"],
    combine: Combine | None = None,
    down: Float[Array, "r C"] | None = None,
) -> Float[Array, "B T N V"]:
    """Attention in the latent space over `chosen`: the J cached entries picked for each token, those `real` of them."""
    scores = _scores("btnc,btjc->btnj", fold_query(q, w_key, down), chosen) * q.shape[-1] ** -0.5
    scores = jnp.where(real[:, :, None, :], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1)
    share = jnp.exp(scores - _finite(peak)[..., None])
    entries = chosen[..., : latent_rank(w_key, down)]
    mixed = _scores("btnj,btjc->btnc", share.astype(q.dtype), entries)
    mixed = _finish(peak, jnp.sum(share, axis=-1), mixed, combine).astype(q.dtype)
    return jnp.einsum("btnc,nvc->btnv", _beside(mixed, down), w_value.astype(mixed.dtype))


def fold_query(
    q: Float[Array, "B T N HR"], w_key: Float[Array, "N H CA"], down: Float[Array, "r C"] | None = None
) -> Float[Array, "B T N CR"]:
    """`[W_kᵀ q_n, q_r]`: the query that meets cached entries directly."""
    width, rank = w_key.shape[1], latent_rank(w_key, down)
    latent = jnp.einsum("btnh,nhc->btnc", q[..., :width], w_key.astype(q.dtype))
    if down is not None:
        latent = latent[..., :rank] + jnp.einsum("btnr,rc->btnc", latent[..., rank:], down.astype(q.dtype))
    return jnp.concatenate([latent, q[..., width:]], axis=-1)


def _scores(equation: str, q: Array, key: Array) -> Array:
    """Products accumulated and kept in float32 at least."""
    return jnp.einsum(equation, q, key, preferred_element_type=wide_dtype(q.dtype))


def _attend(
    latents: Array,
    positions: Array,
    num_blocks: Array | int,
    block: Callable[[Array], tuple[Array, Array]],
    mix: str,
    width: int,
    like: Array,
    layer: Array | None,
    since: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Softmax over the entries `since` to `positions`, block after block; `block` gives scaled scores and values.

    **Returns:** the highest score, the sum of the shares over it, and the values mixed by these.
    """
    capacity = latents.shape[-2]
    wide = wide_dtype(like.dtype)
    shape = like.shape[:3]

    def one_block(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, mixed = carry
        start, seen = _block_bounds(j, capacity, positions, since)
        scores, values = block(widened(cached_positions(latents, start, seen.shape[-1], layer), like.dtype))
        scores = jnp.where(seen[:, :, None, :], scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        share = jnp.exp(scores - _finite(new_peak)[..., None])
        fade = jnp.exp(peak - _finite(new_peak))
        part = jnp.einsum(mix, share.astype(values.dtype), values, preferred_element_type=wide)
        return new_peak, total * fade + jnp.sum(share, axis=-1), mixed * fade[..., None] + part

    start = (jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide), jnp.zeros((*shape, width), wide))
    return jax.lax.fori_loop(0, num_blocks, one_block, start)


def _block_bounds(j: Array, capacity: int, positions: Array, since: Array | None) -> tuple[Array, Array]:
    """Where a block of entries starts, and which of its entries each query sees, `[B, T, J]`."""
    size = min(KEY_BLOCK, capacity)
    # The last block of a cache that is no multiple of the size starts earlier and masks what it repeats.
    start = jnp.minimum(j * size, capacity - size)
    place = start + jnp.arange(size, dtype=positions.dtype)
    seen = (place[None, None, :] >= j * size) & (place[None, None, :] <= positions[:, :, None])
    if since is not None:
        seen &= place[None, None, :] >= since[:, :, None]
    return start, seen


def _finite(peak: Array) -> Array:
    """A number to subtract: the peak, or 0 where a query sees none of the entries here."""
    return jnp.where(jnp.isneginf(peak), 0, peak)


def _finish(peak: Array, total: Array, mixed: Array, combine: Combine | None) -> Array:
    """The softmax-weighted mean; every query sees its own position somewhere."""
    if combine is not None:
        peak, total, mixed = combine(peak, total, mixed)
    return mixed / total[..., None]
