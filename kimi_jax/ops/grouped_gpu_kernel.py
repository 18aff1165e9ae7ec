"""The grouped product of MXFP4 experts as a Pallas kernel for NVIDIA GPUs, compiled by Triton.

A program of the grid takes one visit, a few rows of one expert, and a block of what these yield: it goes through the
inputs, fetches codes and scales as they are stored and unpacks them in registers next to the multiply. Programs run at
the same time, so that each writes the rows of its own visit only.

A byte holds inputs 2j and 2j + 1. As in `kimi_jax.ops.grouped_kernel` nothing interleaves them: the rows' even and odd
columns are split. The matrix is the left operand, `(W xᵀ)ᵀ`: that one a tensor core takes from registers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kimi_jax.ops.mxfp4 import BYTES_OF_SCALE, scale_values

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # a jaxlib without Triton
    plgpu = None  # type: ignore[assignment]

SMALLEST_TILE, LARGEST_TILE = 16, 64
"""Rows of a visit: a tensor core takes no fewer; with more the registers would not hold the sums beside the codes."""
OUTPUTS = 64
"""Outputs handled at a time."""
GROUPS = 8
"""Scales of an output handled at a time; with fewer of them Triton fetches none ahead."""
BYTES = GROUPS * BYTES_OF_SCALE


def fits_gpu_kernel(packed_shape: Sequence[int], dtype: jnp.dtype) -> bool:
    """Whether the kernel takes rows of `dtype` and codes `[…, E, O, I/2]`: whole blocks, of a size it reaches."""
    outputs, width = packed_shape[-2:]
    whole = outputs % OUTPUTS == 0 and width % BYTES == 0
    taken = dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    return plgpu is not None and whole and taken and _reached(packed_shape[-3:])


def _reached(shape: Sequence[int]) -> bool:
    """Whether places in an array of bytes are counted rightly: up to 4 GiB in 32 bits, which Triton takes as signed."""
    return not 2**31 < math.prod(shape) <= 2**32


def gpu_tile_rows(rows: int, experts: int, itemsize: int) -> int:
    """Rows of a visit at most: a power of two above the mean load of an expert; 16 of four bytes a number."""
    largest = LARGEST_TILE if itemsize == 2 else SMALLEST_TILE  # float32 is no work for tensor cores, and sums spill
    return min(largest, max(SMALLEST_TILE, 1 << (rows // experts).bit_length()))


def row_visits(group_sizes: Int[Array, " E"], rows: int, tile: int) -> tuple[Array, Array, Array]:
    """All rows in pieces of at most `tile` rows of one expert.

    **Returns:** the expert of each piece, its first row and the row behind its last, `[visits]` with as many visits as
    `rows` rows can ever need; those too many have no rows.
    """
    experts, sizes = group_sizes.shape[0], group_sizes.astype(jnp.int32)
    busy = min(experts, rows)
    number = jnp.arange(busy + (rows - busy) // tile, dtype=jnp.int32)
    ends = jnp.cumsum(sizes)
    pieces = jax.lax.div(sizes + (tile - 1), jnp.full_like(sizes, tile))
    last_pieces = jnp.cumsum(pieces)
    expert = jnp.sum(last_pieces[None, :] <= number[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    first = (ends - sizes)[expert] + (number - (last_pieces - pieces)[expert]) * tile
    return expert, first, jnp.minimum(first + tile, ends[expert])


def gpu_kernel_work(
    rows: int, experts: int, outputs: int, width: int, itemsize: int, filled: float, met: float
) -> tuple[float, float]:
    """FLOPs, and bytes of memory read and written, by a call of `gpu_kernel_product`.

    Arguments as `kimi_jax.ops.grouped_kernel.kernel_work`. The visits of an expert follow each other and find its
    codes in the cache of the chip, as the programs of a visit find its rows: both count once.
    """
    tile = gpu_tile_rows(rows, experts, itemsize)
    visited = met if filled <= met * tile else filled / tile + met / 2  # a group's last visit is half empty
    flops = 2 * visited * tile * outputs * 2 * width
    return flops, met * outputs * (width + width / BYTES_OF_SCALE) + filled * (2 * width + outputs) * itemsize


def gpu_kernel_product(
    rows: Float[Array, "M I"],
    weights: Mapping[str, Array],
    group_sizes: Int[Array, " E"],
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """`out[r] = W[expert of r] · rows[r]`, or with the transposed matrices; rows behind the last group are zero.

    Arguments as `kimi_jax.ops.grouped_kernel.kernel_product`; what the kernel takes, `fits_gpu_kernel` tells.
    """
    total = rows.shape[0]
    packed, scale, layer = _stacks(weights)
    *lead, outputs, width = packed.shape
    tile = gpu_tile_rows(total, lead[-1], rows.dtype.itemsize)
    visits = row_visits(group_sizes, total, tile)
    inputs: tuple[Array, ...]
    made: tuple[int, ...]
    if transposed:
        body, blocks, inputs, made = _transposed_body, width // BYTES, (rows,), (width, width)
    else:
        body, blocks, inputs, made = _body, outputs // OUTPUTS, (rows[:, 0::2], rows[:, 1::2]), (outputs,)
    # Two programs share a core: its 228 kB hold two or three steps' operands for each.
    stages = 3 if tile < LARGEST_TILE else 2
    out = pl.pallas_call(
        partial(body, tile),
        grid=(blocks, visits[0].shape[0]),
        out_shape=[jax.ShapeDtypeStruct((total, columns), rows.dtype) for columns in made],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=stages),
        interpret=interpret,
    )(layer, *visits, *inputs, packed.reshape((*lead, outputs, -1, BYTES_OF_SCALE)), scale[..., None])
    whole = jnp.stack(out, axis=-1).reshape((total, 2 * width)) if transposed else out[0]
    return jnp.where((jnp.arange(total) < jnp.sum(group_sizes))[:, None], whole, 0)


def _stacks(weights: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Codes and scales as stacks of layers, and the place `[1]` of the one to use."""
    packed, scale = weights["weight_packed"], weights["weight_scale"]
    first = jnp.zeros(1, jnp.int32)
    if "layer" not in weights:
        return packed[None], scale[None], first
    layer = weights["layer"].astype(jnp.int32)
    if _reached(packed.shape):
        return packed, scale, layer.reshape(1)
    packed, scale = (jax.lax.dynamic_index_in_dim(x, layer) for x in (packed, scale))
    return packed, scale, first


def _visit(tile: int, lists: Sequence[Any], run: Callable[[Array, Any, Array], None]) -> None:
    """Calls `run` with the expert, the slice of rows and which of these are the visit's, unless it has none."""
    experts, firsts, ends = lists
    t = pl.program_id(1)
    first, end = firsts[t], ends[t]

    @pl.when(first < end)
    def _() -> None:
        run(experts[t], pl.ds(first, tile), (first + jnp.arange(tile, dtype=jnp.int32) < end)[:, None])


def _body(tile: int, *refs: Any) -> None:
    """A block of one expert's outputs for the rows of a visit."""
    layer, *lists, even, odd, codes, scale, out = refs
    block = pl.ds(pl.program_id(0) * OUTPUTS, OUTPUTS)

    def run(expert: Array, rows: Any, own: Array) -> None:
        def step(k: Array, product: Array) -> Array:
            halves = _unpacked(codes, scale, (layer[0], expert, block, pl.ds(k * GROUPS, GROUPS)), out.dtype)
            for x, matrix in zip((even, odd), halves, strict=True):
                part = plgpu.load(x.at[rows, pl.ds(k * BYTES, BYTES)], mask=own, other=0)
                product += _dot(matrix, part, contracted=1)
            return product

        steps = codes.shape[-2] // GROUPS
        product = jax.lax.fori_loop(0, steps, step, jnp.zeros((OUTPUTS, tile), jnp.float32))
        plgpu.store(out.at[rows, block], product.T.astype(out.dtype), mask=own)

    _visit(tile, lists, run)


def _transposed_body(tile: int, *refs: Any) -> None:
    """A block of one expert's inputs, the even and the odd ones, for the rows of a visit."""
    layer, *lists, given, codes, scale, even, odd = refs
    block = pl.program_id(0)

    def run(expert: Array, rows: Any, own: Array) -> None:
        def step(k: Array, products: tuple[Array, Array]) -> tuple[Array, Array]:
            outputs = pl.ds(k * OUTPUTS, OUTPUTS)
            low, high = _unpacked(codes, scale, (layer[0], expert, outputs, pl.ds(block * GROUPS, GROUPS)), even.dtype)
            part = plgpu.load(given.at[rows, outputs], mask=own, other=0)
            return products[0] + _dot(low, part, contracted=0), products[1] + _dot(high, part, contracted=0)

        zeros = jnp.zeros((BYTES, tile), jnp.float32)
        products = jax.lax.fori_loop(0, codes.shape[-3] // OUTPUTS, step, (zeros, zeros))
        for out, product in zip((even, odd), products, strict=True):
            plgpu.store(out.at[rows, pl.ds(block * BYTES, BYTES)], product.T.astype(out.dtype), mask=own)

    _visit(tile, lists, run)


def _dot(matrix: Array, rows: Array, contracted: int) -> Array:
    """A matrix times rows, summed over the matrix's axis `contracted` and the rows' columns, in float32."""
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None  # else Triton takes TF32
    axes = (((contracted,), (1,)), ((), ()))
    return jax.lax.dot_general(matrix, rows, axes, precision=precision, preferred_element_type=jnp.float32)


def _unpacked(codes: Any, scale: Any, at: tuple[Any, ...], dtype: jnp.dtype) -> tuple[Array, Array]:
    """Low and high halves of the codes of `at`, times their scales, `[O, n]` bytes each.

    A code's sign, exponent and fraction are put where a float16 has them: its value times 2^-14, exactly, for a float16
    counts on below its normal numbers as a code does. This takes half the operations of `code_values`.
    """
    wide = codes[*at, :].astype(jnp.int32)
    scales = scale_values(scale[*at, :].astype(jnp.int32))
    low = ((wide & 8) << 12) | ((wide & 7) << 9)
    high = ((wide & 128) << 8) | ((wide & 112) << 5)

    def matrix(bits: Array) -> Array:
        values = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16) * 2.0**14
        return (values.astype(jnp.float32) * scales).astype(dtype).reshape((bits.shape[0], -1))

    return matrix(low), matrix(high)
