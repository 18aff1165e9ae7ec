"""The one door to the experts' weights: a matrix product in which every row has its own expert.

`weights` is one projection of all experts (or of a device's own): `{"weight": [E, O, I]}` in a floating dtype, or
`{"weight_packed": [E, O, I/2], "weight_scale": [E, O, I/32]}` in MXFP4. The arrays may be stacks of several layers,
`[G, E, …]`, with the number of the one to use beside them as `"layer"`. Rows come sorted by expert.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.mxfp4 import dequantize

ExpertWeights = Mapping[str, Array]


def num_experts(weights: ExpertWeights) -> int:
    """Experts held in `weights`."""
    return _stored(weights).shape[-3]


def output_width(weights: ExpertWeights) -> int:
    """Rows O of one expert's matrix."""
    return _stored(weights).shape[-2]


def _stored(weights: ExpertWeights) -> Array:
    return weights["weight"] if "weight" in weights else weights["weight_packed"]


def expert_matrix(weights: ExpertWeights, expert: Int[Array, ""], dtype: jnp.dtype) -> Float[Array, "O I"]:
    """One expert's matrix in `dtype`, unpacked if need be."""
    place = (weights["layer"].astype(expert.dtype), expert) if "layer" in weights else (expert,)

    def matrix(stack: Array) -> Array:
        # One slice, whatever it is a part of: what lies around it is neither read nor copied.
        start = (*place, *(jnp.zeros_like(expert),) * 2)
        return jax.lax.dynamic_slice(stack, start, (*(1,) * len(place), *stack.shape[-2:])).reshape(stack.shape[-2:])

    own = {name: matrix(w) for name, w in weights.items() if name != "layer"}
    if "weight" in own:
        return own["weight"].astype(dtype)
    return dequantize(own["weight_packed"], own["weight_scale"], dtype)


def grouped_matmul_reference(
    rows: Float[Array, "M I"], weights: ExpertWeights, group_sizes: Int[Array, " E"]
) -> Float[Array, "M O"]:
    """The plain form, for small sizes: every expert applied to every row, the wrong ones masked out."""
    ends = jnp.cumsum(group_sizes)
    expert_of_row = jnp.sum(ends[None, :] <= jnp.arange(rows.shape[0])[:, None], axis=1)
    every = jax.vmap(lambda e: rows @ expert_matrix(weights, e, rows.dtype).T)(jnp.arange(len(group_sizes)))
    own = expert_of_row[None, :, None] == jnp.arange(len(group_sizes))[:, None, None]
    return jnp.sum(jnp.where(own, every, 0), axis=0)


def grouped_matmul(
    rows: Float[Array, "M I"], weights: ExpertWeights, group_sizes: Int[Array, " E"]
) -> Float[Array, "M O"]:
    """`out[r] = W[expert of r] · rows[r]`, one tile of rows and one unpacked expert at a time.

    **Arguments:**

    - `rows`: sorted by expert: the first `group_sizes[0]` rows belong to expert 0, and so on.
    - `weights`: one projection of all experts, packed or not.
    - `group_sizes`: rows of each expert; their sum may be smaller than M, never larger.

    **Returns:** the products in `rows.dtype`. Rows behind the last group are zero.

    The loop runs over the tiles that hold rows, so that an expert nobody chose costs nothing and M is only a
    bound. A tile of the last rows of a group covers some of the next group too; those are left alone.
    """
    count, total = num_experts(weights), rows.shape[0]
    if total == 0:
        return jnp.zeros((0, output_width(weights)), rows.dtype)
    tile = min(total, _tile_rows(total, count))
    ends = jnp.cumsum(group_sizes)
    tiles = jax.lax.div(group_sizes + (tile - 1), jnp.asarray(tile, group_sizes.dtype))
    last_tiles = jnp.cumsum(tiles)
    # Tile t, counted over all experts, starts at row `shift[expert] + t·tile`.
    shift = ends - group_sizes - (last_tiles - tiles) * tile

    def one_tile(t: Array, out: Array) -> Array:
        expert = jnp.sum(last_tiles <= t)
        first = shift[expert] + t * tile
        # A slice that would reach past the end starts earlier: JAX would shift it silently, so shift it here.
        start = jnp.minimum(first, total - tile)
        product = jax.lax.dynamic_slice_in_dim(rows, start, tile) @ expert_matrix(weights, expert, rows.dtype).T
        number = start + jnp.arange(tile)
        own = ((number >= first) & (number < ends[expert]))[:, None]
        kept = jax.lax.dynamic_slice_in_dim(out, start, tile)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(own, product, kept), start, axis=0)

    return jax.lax.fori_loop(0, last_tiles[-1], one_tile, jnp.zeros((total, output_width(weights)), rows.dtype))


def _tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile: near the mean load of an expert, a power of two between 8 and 256."""
    return min(256, max(8, 1 << (rows // max(1, experts)).bit_length()))
