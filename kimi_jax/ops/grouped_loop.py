"""The grouped product in plain JAX: a loop over tiles of rows, one unpacked expert at a time.

The loop runs over the tiles that hold rows, so that an expert nobody chose costs nothing and the number of rows is only
a bound. A tile of the last rows of a group covers some of the next group too; those are left alone.

A byte of a packed matrix holds inputs 2j and 2j + 1. Nothing interleaves them: a matrix is two of half the width, one
for the rows' even columns and one for the odd ones.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.mxfp4 import BYTES_OF_SCALE, code_values, scale_values
from kimi_jax.ops.norms import wide_dtype


def one_matrix(weights: Mapping[str, Array], expert: Int[Array, ""]) -> dict[str, Array]:
    """One expert's stored arrays, each a single slice: what lies around it is neither read nor copied."""
    place = (weights["layer"].astype(expert.dtype), expert) if "layer" in weights else (expert,)

    def matrix(stack: Array) -> Array:
        start = (*place, *(jnp.zeros_like(expert),) * 2)
        return jax.lax.dynamic_slice(stack, start, (*(1,) * len(place), *stack.shape[-2:])).reshape(stack.shape[-2:])

    return {name: matrix(w) for name, w in weights.items() if name != "layer"}


def _parts(weights: Mapping[str, Array], expert: Array, dtype: jnp.dtype) -> tuple[Array, ...]:
    """One expert's matrix as those of the columns 0, n, 2n, …; 1, n + 1, …, with n = 2 where it is packed, else 1."""
    own = one_matrix(weights, expert)
    if "weight" in own:
        matrix = own["weight"]
        # Behind a barrier: the compiler would convert all experts first and slice what it made.
        return (matrix if matrix.dtype == dtype else jax.lax.optimization_barrier(matrix).astype(dtype),)
    packed = own["weight_packed"]
    scale = jnp.repeat(scale_values(own["weight_scale"]), BYTES_OF_SCALE, axis=-1)
    return tuple((code_values(half) * scale).astype(dtype) for half in (packed & 15, packed >> 4))


class _Tiles(NamedTuple):
    """Tiles of rows, counted over all experts."""

    size: int
    number: Array
    bounds: Callable[[Array], tuple[Array, Array, Array]]
    """Of tile t: its expert, the row it starts at, and which of its rows are the expert's."""


def tile_rows(rows: int, experts: int, least: int = 8) -> int:
    """Rows of a tile: the power of two next to the mean load of an expert, between `least` and 256."""
    return min(rows, 256, max(least, 1 << max(0, (4 * rows // (3 * experts)).bit_length() - 1)))


def _tiles(total: int, group_sizes: Array, least: int) -> _Tiles:
    size = tile_rows(total, group_sizes.shape[0], least)
    ends = jnp.cumsum(group_sizes)
    tiles = jax.lax.div(group_sizes + (size - 1), jnp.asarray(size, group_sizes.dtype))
    last_tiles = jnp.cumsum(tiles)
    shift = ends - group_sizes - (last_tiles - tiles) * size  # tile t of an expert starts at row shift + t · size

    def bounds(t: Array) -> tuple[Array, Array, Array]:
        expert = jnp.sum(last_tiles <= t)
        first = shift[expert] + t * size
        # A slice that would reach past the end starts earlier: JAX would shift it silently, so shift it here.
        start = jnp.minimum(first, total - size)
        number = start + jnp.arange(size)
        return expert, start, ((number >= first) & (number < ends[expert]))[:, None]

    return _Tiles(size, last_tiles[-1], bounds)


def _wide_product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, preferred_element_type=wide_dtype(left.dtype))


def loop_product(
    rows: Float[Array, "M I"],
    weights: Mapping[str, Array],
    group_sizes: Int[Array, " E"],
    *,
    transposed: bool = False,
    least: int = 8,
) -> Float[Array, "M O"]:
    """`out[r] = W[expert of r] · rows[r]`, or with the transposed matrices; rows behind the last group are zero.

    `least`: rows of a tile at least, however few an expert has.
    """
    total = rows.shape[0]
    tiles = _tiles(total, group_sizes, least)
    parts = jax.eval_shape(lambda: _parts(weights, jnp.zeros((), group_sizes.dtype), rows.dtype))
    count, (outputs, width) = len(parts), parts[0].shape
    inputs = (rows,) * count if transposed else tuple(rows[:, i::count] for i in range(count))
    shapes = ((total, width),) * count if transposed else ((total, outputs),)

    def one_tile(t: Array, out: tuple[Array, ...]) -> tuple[Array, ...]:
        expert, start, own = tiles.bounds(t)
        products = [
            _wide_product(jax.lax.dynamic_slice_in_dim(x, start, tiles.size), matrix if transposed else matrix.T)
            for x, matrix in zip(inputs, _parts(weights, expert, rows.dtype), strict=True)
        ]
        products = products if transposed else [sum(products[1:], start=products[0])]

        def store(kept: Array, product: Array) -> Array:
            before = jax.lax.dynamic_slice_in_dim(kept, start, tiles.size)
            new = jnp.where(own, product.astype(kept.dtype), before)
            return jax.lax.dynamic_update_slice_in_dim(kept, new, start, axis=0)

        return tuple(store(*pair) for pair in zip(out, products, strict=True))

    zeros = tuple(jnp.zeros(shape, rows.dtype) for shape in shapes)
    out = jax.lax.fori_loop(0, tiles.number, one_tile, zeros)
    return out[0] if len(out) == 1 else jnp.stack(out, axis=-1).reshape((total, -1))


def loop_weight_gradient(
    rows: Float[Array, "M I"],
    gradient: Float[Array, "M O"],
    weights: Mapping[str, Array],
    group_sizes: Int[Array, " E"],
) -> Float[Array, "*lead E O I"]:
    """`Σ_r gradient[r] ⊗ rows[r]` over each expert's rows, in the shape and dtype of `weights["weight"]`."""
    stack = weights["weight"]
    tiles = _tiles(rows.shape[0], group_sizes, least=8)

    def one_tile(t: Array, out: Array) -> Array:
        expert, start, own = tiles.bounds(t)
        left, right = (jax.lax.dynamic_slice_in_dim(x, start, tiles.size) for x in (gradient, rows))
        product = _wide_product(jnp.where(own, left, 0).T, jnp.where(own, right, 0))
        place = (weights["layer"], expert) if "layer" in weights else (expert,)
        return out.at[place].add(product.astype(out.dtype))

    zeros = jnp.zeros(stack.shape, wide_dtype(stack.dtype))
    return jax.lax.fori_loop(0, tiles.number, one_tile, zeros).astype(stack.dtype)
