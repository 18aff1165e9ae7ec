"""Decoding over cached latents as a Pallas kernel for TPU: each row's filled blocks are read from the stack, once.

A TPU keeps the cache with its positions innermost (`kimi_jax.parallel.sharding.positions_innermost`); the kernel takes
it so. A row's grid steps behind its last filled block fetch nothing.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kimi_jax.ops.tpu import LANES, kernel_dot, lies_positions_innermost

LARGEST_BLOCK = 512
"""Positions of a block: half a megabyte of K3's latents."""


def fits_kernel(q: jax.ShapeDtypeStruct | Array, latents: jax.ShapeDtypeStruct | Array, rank: int) -> bool:
    """Whether the kernel takes queries `[B, T, N, X]` and latents `[…, B, S, X]` of which `rank` numbers are values."""
    positions, width = latents.shape[-2:]
    whole = lies_positions_innermost(positions, width) and width % 16 == 0 and rank % LANES == 0
    return q.shape[1] == 1 and whole and q.dtype == latents.dtype and q.dtype in (jnp.bfloat16, jnp.float32)


def block_size(capacity: int) -> int:
    """Positions of a block: the largest multiple of the lanes that divides the cache."""
    return next(size for size in range(LARGEST_BLOCK, 0, -LANES) if capacity % size == 0)


def kernel_work(arrays: Sequence[tuple[int, ...]], filled: int, rank: int, itemsize: int) -> tuple[float, float]:
    """FLOPs, and bytes of memory read, by a call of `kernel_attention` on rows of `filled` positions each.

    `arrays`: the shapes of the queries `[B, N, X]` and of the latents `[…, X, S]`.
    """
    (rows, heads, width), (*_, capacity) = arrays
    block = block_size(capacity)
    read = min(-(-filled // block) * block, capacity)
    return 2.0 * rows * heads * read * (width + rank), float(rows * read * width * itemsize)


def kernel_attention(
    folded: Float[Array, "B N X"],
    latents: Float[Array, "*G B S X"],
    rank: int,
    positions: Int[Array, " B"],
    scale: float,
    layer: Int[Array, ""] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B N"], Float[Array, "B N"], Float[Array, "B N C"]]:
    """A row's query against its entries up to `positions`: the scores' peak, the sum of `exp(score - peak)`, and the
    values weighed so.

    **Arguments:**

    - `folded`: queries that meet cached entries directly; `scale`: what their products are multiplied by.
    - `latents`, `layer`: as `kimi_jax.ops.latent_attention` has them; the first C = `rank` numbers are the values.
    - `positions`: the last entry that each row sees; negative where it sees none: peak -inf, sum and values 0.
    - `interpret`: run the kernel's steps as ordinary operations, on any machine.
    """
    stack = jnp.swapaxes(latents if layer is not None else latents[None], -1, -2)
    (rows, heads, width), capacity = folded.shape, stack.shape[-1]
    block = block_size(capacity)
    last = jnp.clip(positions // block, 0, capacity // block - 1).astype(jnp.int32)
    number = jnp.zeros((1,), jnp.int32) if layer is None else layer.reshape(1).astype(jnp.int32)
    if not interpret:
        stack = pltpu.with_memory_space_constraint(stack, pltpu.HBM)

    def whole(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, size), lambda b, j, *s: (b, 0, 0))

    # A step's place in the grid is (row b, block j); `s` are the layer, each row's last block, and its position.
    entries = pl.BlockSpec((None, None, width, block), lambda b, j, *s: (s[0][0], b, 0, jnp.minimum(j, s[1][b])))
    peak, total, mixed = pl.pallas_call(
        partial(_body, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows, jnp.max(last) + 1),
            in_specs=[whole(width), entries],
            out_specs=[whole(LANES), whole(LANES), whole(rank)],
        ),
        out_shape=[jax.ShapeDtypeStruct((rows, heads, size), jnp.float32) for size in (LANES, LANES, rank)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(number, last, positions.astype(jnp.int32), folded, stack)
    return peak[..., 0], total[..., 0], mixed


def _body(
    _: Any, last: Any, positions: Any, q: Any, entries: Any, peak: Any, total: Any, mixed: Any, *, scale: float
) -> None:
    """One block of one row, merged with the row's blocks before it."""
    b, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def clear() -> None:
        peak[...] = jnp.full(peak.shape, -jnp.inf, peak.dtype)
        total[...] = jnp.zeros(total.shape, total.dtype)
        mixed[...] = jnp.zeros(mixed.shape, mixed.dtype)

    @pl.when(j <= last[b])
    def merge() -> None:
        block = entries[...]
        scores = kernel_dot(q[...], block, contracted=0) * scale
        place = j * block.shape[1] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(place <= positions[b], scores, -jnp.inf)
        before = peak[:, :1]
        highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        finite = jnp.where(highest == -jnp.inf, 0.0, highest)
        share, fade = jnp.exp(scores - finite), jnp.exp(before - finite)
        peak[...] = jnp.broadcast_to(highest, peak.shape)
        total[...] = total[...] * fade + jnp.sum(share, axis=1, keepdims=True)
        values = block[: mixed.shape[1]]
        mixed[...] = mixed[...] * fade + kernel_dot(share.astype(block.dtype), values, contracted=1)
