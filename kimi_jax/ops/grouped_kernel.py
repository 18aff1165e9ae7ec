"""The grouped product of MXFP4 experts as a Pallas kernel for TPU.

Weights stay packed until they lie on the chip: a grid step fetches a block of one expert's codes and scales, unpacks a
few columns at a time next to the multiply, and the next block is fetched meanwhile. Only experts with rows are
fetched, each block once, for rows come sorted.

A byte holds inputs 2j and 2j + 1. Nothing interleaves them: the rows' even and odd columns are split instead, and
`x W = x_even W_low + x_odd W_high`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kimi_jax.ops.mxfp4 import BYTES_OF_SCALE, code_values, scale_values
from kimi_jax.ops.tpu import LANES, kernel_dot

LARGEST_TILE = 128
"""Rows of a tile: a group's last tile is on average half empty, and larger ones load no expert less often."""
OUTPUT_BLOCK = 1024
COLUMNS = 512
"""Bytes of a row of codes that are unpacked at a time."""
FAST_MEMORY = 48 * 2**20
"""Bytes of a core's fast memory (VMEM) that the kernel may take; TPU7x has 64 MiB."""


def fits_kernel(packed_shape: Sequence[int]) -> bool:
    """Whether the kernel takes codes `[…, O, I/2]`: whole lanes of bytes and of outputs, a row's scales in one."""
    outputs, width = packed_shape[-2:]
    return width % LANES == 0 and outputs % LANES == 0 and width <= LANES * BYTES_OF_SCALE


def _block(size: int, largest: int) -> int:
    """The largest divisor of `size` that is a multiple of the lanes and at most `largest`."""
    return next(block for block in range(min(size, largest) // LANES * LANES, 0, -LANES) if size % block == 0)


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile, a multiple of 16: all where they are few, else near the mean load of an expert."""
    return min(-(-rows // 16) * 16, LARGEST_TILE, max(16, 1 << (rows // max(1, experts)).bit_length()))


def visits(group_sizes: Int[Array, " E"], rows: int, tile: int) -> tuple[Array, Array, Array, Array]:
    """Which expert meets which tile of rows, in the order of the rows.

    **Returns:** the experts and the tiles `[visits]`, of which the first `count` are meant; `count`, at least 1; and
    where each expert's rows begin and the last one's end, `[E + 1]`.
    """
    experts = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    first = starts // tile
    tiles = jnp.where(group_sizes > 0, (ends - 1) // tile - first + 1, 0)
    last_visits = jnp.cumsum(tiles)
    number = jnp.arange(-(-rows // tile) + experts - 1, dtype=group_sizes.dtype)
    expert = jnp.minimum(jnp.sum(last_visits[None, :] <= number[:, None], axis=1, dtype=jnp.int32), experts - 1)
    at = first[expert] + number - (last_visits - tiles)[expert]
    at = jnp.clip(at, 0, -(-rows // tile) - 1).astype(jnp.int32)
    count = jnp.maximum(last_visits[-1], 1).astype(jnp.int32)
    return expert, at, count, jnp.concatenate([starts, ends[-1:]]).astype(jnp.int32)


def kernel_work(
    rows: int, experts: int, outputs: int, width: int, itemsize: int, filled: float, met: float
) -> tuple[float, float]:
    """FLOPs, and bytes of memory read and written, by a call of `kernel_product`.

    **Arguments:**

    - `rows`: of the call, of `itemsize` bytes a number; `filled` of them belong to the `met` experts that have any.
    - `experts`, `outputs`, `width`: experts held, each of `outputs` × `width` bytes of codes.
    """
    tile = tile_rows(rows, experts)
    tiles = max(1.0, filled / tile)
    visited = met + tiles - 1  # a tile once for each expert that has rows in it
    flops = 2 * visited * tile * outputs * 2 * width
    weights = met * outputs * (width + width / BYTES_OF_SCALE)
    read = tiles * tile * 2 * width * itemsize * (outputs / _block(outputs, OUTPUT_BLOCK))
    return flops, weights + read + tiles * tile * outputs * itemsize


def kernel_product(
    rows: Float[Array, "M I"],
    weights: Mapping[str, Array],
    group_sizes: Int[Array, " E"],
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """`out[r] = W[expert of r] · rows[r]`, or with the transposed matrices; rows behind the last group are zero.

    **Arguments:**

    - `rows`: sorted by expert, `[M, I]`; `[M, O]` where `transposed`.
    - `weights`: packed experts, perhaps of several layers, as `kimi_jax.ops.grouped_matmul` has them; what shapes the
        kernel takes, `fits_kernel` tells.
    - `group_sizes`: rows of each expert; at most M in all.
    - `interpret`: run the kernel's steps as ordinary operations, on any machine.
    """
    total = rows.shape[0]
    packed, scale = weights["weight_packed"], weights["weight_scale"]
    layer = weights.get("layer", jnp.zeros((), jnp.int32))
    if "layer" not in weights:
        packed, scale = packed[None], scale[None]
    # The scales of a row are fewer than the lanes: arrays of such a shape lie on a TPU with the outputs innermost, and
    # any other order would have the kernel's operand copied, all layers of it.
    scale = jnp.swapaxes(scale, -1, -2)
    (_, experts, outputs, width), groups = packed.shape, scale.shape[-2]
    tile = tile_rows(total, experts)
    *lists, count, bounds = visits(group_sizes, total, tile)

    inputs: tuple[Array, ...]
    shape: tuple[int, ...]
    # A step's place in the grid is (block o, visit t); `s` are the lists that tell what visit t is.
    if transposed:
        block, body, inputs = _block(width, COLUMNS // 2), _transposed_body, (rows,)
        code_spec = pl.BlockSpec((None, None, outputs, block), lambda o, t, *s: (s[0][0], s[1][t], 0, o))
        scale_spec = pl.BlockSpec((None, None, groups, outputs), lambda o, t, *s: (s[0][0], s[1][t], 0, 0))
        out_spec = pl.BlockSpec((2, tile, block), lambda o, t, *s: (0, s[2][t], o))
        blocks, shape = width // block, (2, total, width)
    else:
        block, body, inputs = _block(outputs, OUTPUT_BLOCK), _body, (rows[:, 0::2], rows[:, 1::2])
        code_spec = pl.BlockSpec((None, None, block, width), lambda o, t, *s: (s[0][0], s[1][t], o, 0))
        scale_spec = pl.BlockSpec((None, None, groups, block), lambda o, t, *s: (s[0][0], s[1][t], 0, o))
        out_spec = pl.BlockSpec((tile, block), lambda o, t, *s: (s[2][t], o))
        blocks, shape = outputs // block, (total, outputs)
    if not interpret:
        # Told to, for the compiler would take the whole of a small enough stack into fast memory before each call.
        packed, scale = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (packed, scale))
    row_specs = [pl.BlockSpec((tile, x.shape[1]), lambda o, t, *s: (s[2][t], 0)) for x in inputs]
    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(blocks, count),
            in_specs=[*row_specs, code_spec, scale_spec],
            out_specs=out_spec,
        ),
        out_shape=jax.ShapeDtypeStruct(shape, rows.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=FAST_MEMORY
        ),
        interpret=interpret,
    )(layer.reshape(1).astype(jnp.int32), *lists, bounds, *inputs, packed, scale)
    if transposed:
        out = jnp.moveaxis(out, 0, -1).reshape((total, 2 * width))
    return jnp.where((jnp.arange(total) < bounds[-1])[:, None], out, 0)


def _body(*refs: Any) -> None:
    """One block of one expert's outputs for one tile of rows."""
    *lists, even, odd, codes, scale, out = refs
    scales, width = _scales(scale[...]), codes.shape[-1]
    columns = _block(width, COLUMNS)
    product = jnp.zeros(out.shape, jnp.float32)
    for start in range(0, width, columns):
        part = slice(start, start + columns)
        halves = _unpacked(codes[:, part], scales, start, out.dtype)
        for x, matrix in zip((even, odd), halves, strict=True):
            product += kernel_dot(x[:, part], matrix, contracted=1)
    _store(out, product, lists)


def _transposed_body(*refs: Any) -> None:
    """One block of one expert's inputs, the even and the odd ones, for one tile of rows."""
    *lists, rows, codes, scale, out = refs
    start = pl.program_id(0) * codes.shape[-1]
    halves = _unpacked(codes[...], _scales(scale[...]), start, out.dtype)
    _store(out, jnp.stack([kernel_dot(rows[...], matrix, contracted=0) for matrix in halves]), lists)


def _store(out: Any, product: Array, lists: Sequence[Any]) -> None:
    """Puts the product into the rows of this visit's expert; the first visit of a tile clears the others."""
    _, expert, at, bounds = lists
    t = pl.program_id(1)
    tile = at[t]
    fresh = (t == 0) | (tile != at[jnp.maximum(t - 1, 0)])
    row = tile * product.shape[-2] + jax.lax.broadcasted_iota(jnp.int32, product.shape, product.ndim - 2)
    own = (row >= bounds[expert[t]]) & (row < bounds[expert[t] + 1])
    kept = jnp.where(fresh, jnp.zeros(out.shape, out.dtype), out[...])
    out[...] = jnp.where(own, product.astype(out.dtype), kept)


def _scales(scale: Array) -> Array:
    """Scale bytes `[groups, O]` as numbers `[O, LANES]`."""
    values = scale_values(scale.astype(jnp.int32))
    return jnp.pad(values, [(0, LANES - scale.shape[0]), (0, 0)]).T


def _unpacked(codes: Array, scale: Array, start: Array | int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Low and high halves of codes `[O, n]` bytes, times their scales, from byte `start` of their rows on."""
    _, width = codes.shape
    lane = (jax.lax.broadcasted_iota(jnp.int32, codes.shape, 1) + start) // BYTES_OF_SCALE
    columns = range(0, width, LANES)
    spread = jnp.concatenate(
        [jnp.take_along_axis(scale, lane[:, column : column + LANES], axis=1) for column in columns], axis=1
    )
    wide = codes.astype(jnp.int32)
    low, high = ((code_values(half) * spread).astype(dtype) for half in (wide & 15, wide >> 4))
    return low, high
