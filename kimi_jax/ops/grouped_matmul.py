"""The one door to the experts' weights: a matrix product in which every row has its own expert.

`weights` is one projection of all experts (or of a device's own): `{"weight": [E, O, I]}` in a floating dtype, or
`{"weight_packed": [E, O, I/2], "weight_scale": [E, O, I/32]}` in MXFP4. The arrays may be stacks of several layers,
`[G, E, …]`, with the number of the one to use beside them as `"layer"`. Rows come sorted by expert.

The forms agree: `grouped_matmul_reference` for small sizes, the loop over tiles of `kimi_jax.ops.grouped_loop`, and
for packed experts the kernels of `kimi_jax.ops.grouped_kernel` on TPU and `grouped_gpu_kernel` on NVIDIA GPUs.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.grouped_gpu_kernel import fits_gpu_kernel, gpu_kernel_product
from kimi_jax.ops.grouped_kernel import fits_kernel, kernel_product
from kimi_jax.ops.grouped_loop import loop_product, loop_weight_gradient, one_matrix
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
    own = one_matrix(weights, expert)
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
    """`out[r] = W[expert of r] · rows[r]`, a tile of rows and a part of an expert at a time.

    **Arguments:**

    - `rows`: sorted by expert: the first `group_sizes[0]` rows belong to expert 0, and so on.
    - `weights`: one projection of all experts, packed or not.
    - `group_sizes`: rows of each expert; their sum may be smaller than M, never larger.

    **Returns:** the products in `rows.dtype`. Rows behind the last group are zero.

    Gradients go to the rows, and to the weights where these are floating; packed ones are constants, unpacked again on
    the way back. Forward-mode derivatives are not defined.
    """
    if rows.shape[0] == 0:
        return jnp.zeros((0, output_width(weights)), rows.dtype)
    return _product(rows, weights, group_sizes)


@jax.custom_vjp
def _product(rows: Array, weights: ExpertWeights, group_sizes: Array) -> Array:
    return _either(rows, weights, group_sizes, transposed=False)


def _forward(rows: Array, weights: ExpertWeights, group_sizes: Array) -> tuple[Array, tuple[Any, ...]]:
    kept = rows if "weight" in weights else None
    return _product(rows, weights, group_sizes), (kept, weights, group_sizes)


def _backward(residuals: tuple[Any, ...], gradient: Array) -> tuple[Any, ...]:
    rows, weights, group_sizes = residuals
    to_rows = _either(gradient, weights, group_sizes, transposed=True)
    if rows is None:
        return to_rows, None, None
    to_weights = loop_weight_gradient(rows, gradient, weights, group_sizes)
    return to_rows, {name: to_weights if name == "weight" else None for name in weights}, None


_product.defvjp(_forward, _backward)


def _either(rows: Array, weights: ExpertWeights, group_sizes: Array, *, transposed: bool) -> Array:
    """Products with the matrices or the transposed ones, by the form that suits machine and arrays."""
    loop = partial(loop_product, transposed=transposed)
    if "weight" in weights:
        # A CPU multiplies a single row as it reads the matrix, and copies the matrix for several.
        single = partial(loop, least=1)
        return jax.lax.platform_dependent(rows, weights, group_sizes, cpu=single, default=loop)
    shape, kernels = weights["weight_packed"].shape, {}
    if fits_kernel(shape):
        kernels["tpu"] = partial(kernel_product, transposed=transposed)
    if fits_gpu_kernel(shape, rows.dtype):
        kernels["cuda"] = partial(gpu_kernel_product, transposed=transposed)
    return jax.lax.platform_dependent(rows, weights, group_sizes, default=loop, **kernels)
