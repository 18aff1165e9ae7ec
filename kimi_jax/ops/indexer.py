"""The lightning indexer of K3.1 (DeepSeek sparse attention): which cached positions a token attends to."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ops.latent_attention import Combine, cached_positions, latent_rank, sparse_attention, widened
from kimi_jax.ops.norms import at_least_float32, wide_dtype
from kimi_jax.ops.selection import best_positions

KEY_BLOCK = 1024
"""Cached positions scored at a time."""
Gather = Callable[[Array], Array]
QUERY_BLOCK = 16
"""Tokens that choose and attend at a time: each gathers its own cached entries."""


def index_scores(
    q: Float[Array, "B T H K"], k: Float[Array, "B S K"], weight: Float[Array, "B T H"]
) -> Float[Array, "B T S"]:
    """`score(t, s) = Σ_h w_h(t) · ReLU(q_h(t)·k(s))`, float32 at least. H index heads, K their width.

    The public definition leaves positive constants and orthogonal rotations open; they do not change the
    choice. A correction belongs here and nowhere else.
    """
    q, k, weight = at_least_float32(q), at_least_float32(k), at_least_float32(weight)
    highest = jax.lax.Precision.HIGHEST
    similarity = jax.nn.relu(jnp.einsum("bthk,bsk->bths", q, k, precision=highest))
    return jnp.einsum("bth,bths->bts", weight, similarity, precision=highest)


def choose_positions(
    q: Float[Array, "B T H K"],
    k: Float[Array, "*G B S K"],
    weight: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    length: Int[Array, ""] | int | None,
    top_k: int,
    first: Int[Array, ""] | int = 0,
    gather: Gather | None = None,
    layer: Int[Array, ""] | None = None,
    since: Int[Array, "B T"] | None = None,
) -> tuple[Int[Array, "B T J"], Bool[Array, "B T J"]]:
    """The `J = min(top_k, S)` cached positions of highest score that lie at or before each token.

    **Arguments:**

    - `q`, `k`, `weight`: as `index_scores`. `positions`: each token's own place in the cache.
    - `length`: positions filled in any row; what lies behind is not scored. None: all of them.
    - `first`, `gather`: where the keys lie on several devices, the first position held here, and what puts the devices'
        best side by side, in the order of their positions, along the last axis.
    - `layer`: where `k` is a stack of several layers' keys, whose to read.
    - `since`: the first position that each token may choose; None: 0.

    A choice has no gradient.

    **Returns:** the positions, and which of them are real: an early token has fewer than `top_k` to choose
    from. Of equal scores the lower position wins.
    """
    q, k, weight = jax.lax.stop_gradient((q, k, weight))
    capacity = k.shape[-2]
    size = min(KEY_BLOCK, capacity)

    def one_block(j: Array, scores: Array) -> Array:
        start = jnp.minimum(j * size, capacity - size)
        part = index_scores(q, cached_positions(k, start, size, layer), weight)
        place = first + start + jnp.arange(size, dtype=positions.dtype)
        seen = place[None, None, :] <= positions[:, :, None]
        if since is not None:
            seen &= place[None, None, :] >= since[:, :, None]
        part = jnp.where(seen, part, -jnp.inf)
        return jax.lax.dynamic_update_slice_in_dim(scores, part, start, axis=2)

    wide = wide_dtype(q.dtype)
    scores = jnp.full((*q.shape[:2], capacity), -jnp.inf, wide)
    filled = capacity if length is None else length - first
    filled = min(filled, capacity) if isinstance(filled, int) else jnp.clip(filled, 0, capacity)
    scores = jax.lax.fori_loop(0, -(-filled // size), one_block, scores)
    best, index = best_positions(scores, min(top_k, capacity), filled)
    index = first + index
    if gather is not None:
        best, index = gather(best), gather(index)
        best, place = best_positions(best, min(top_k, best.shape[-1]))
        index = jnp.take_along_axis(index, place, axis=-1)
    return index, best > -jnp.inf


def indexed_attention(
    q: Float[Array, "B T N HR"],
    latents: Float[Array, "*G B S X"],
    w_key: Float[Array, "N H CA"],
    w_value: Float[Array, "N V CA"],
    index_q: Float[Array, "B T G K"],
    index_k: Float[Array, "*G B S K"],
    index_weight: Float[Array, "B T G"],
    positions: Int[Array, "B T"],
    length: Int[Array, ""] | int | None,
    top_k: int,
    first: Int[Array, ""] | int = 0,
    combine: Combine | None = None,
    gather: Gather | None = None,
    layer: Int[Array, ""] | None = None,
    since: Int[Array, "B T"] | None = None,
    down: Float[Array, "r C"] | None = None,
) -> Float[Array, "B T N V"]:
    """MLA in which each token sees only the `top_k` cached entries that the indexer prefers.

    Blocks of `QUERY_BLOCK` tokens, so that the gathered entries stay few. With at most `top_k` entries before a
    token this equals dense attention. Arguments as `choose_positions` (G index heads) and `prefill_attention`; where
    the entries lie on several devices, each attends to those of the chosen that it holds. Numbers behind the first
    `C + R` of an entry are not read.
    """

    capacity, width = latents.shape[-2], latent_rank(w_key, down) + q.shape[-1] - w_key.shape[-2]
    row = jnp.arange(latents.shape[-3], dtype=jnp.int32)[:, None, None]
    lead = () if layer is None else (layer,)

    def one_block(inputs: tuple[Any, ...]) -> Array:
        q, index_q, index_weight, positions, since = inputs
        index, real = choose_positions(
            index_q, index_k, index_weight, positions, length, top_k, first, gather, layer, since
        )
        held = (index >= first) & (index < first + capacity)
        # Every token's own J entries of the cache, straight from the stack of layers: B·T·J·(C+R) numbers gathered.
        chosen = latents[(*lead, row, jnp.where(held, index - first, 0))][..., :width]
        return sparse_attention(q, widened(chosen, q.dtype), real & held, w_key, w_value, combine, down)

    tokens = q.shape[1]
    block = min(QUERY_BLOCK, tokens)
    blocks = -(-tokens // block)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, blocks * block - tokens)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape((x.shape[0], blocks, block, *x.shape[2:])), 1, 0)

    out = jax.lax.map(one_block, jax.tree.map(split, (q, index_q, index_weight, positions, since)))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape((out.shape[0], blocks * block, *out.shape[3:]))[:, :tokens]
