"""Attention Residuals: a learned mix of the residual stream's saved block sums."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ops.norms import along_last, at_least_float32


class Bank(NamedTuple):
    """The sums of the blocks before the current one.

    - `sums`: `[R, B, T, D]`, room for every block; what is not held yet is zero.
    - `held`: how many there are; a Python number where the layer is known while tracing.
    """

    sums: Float[Array, "R B T D"]
    held: Int[Array, ""] | int


def save_block(bank: Bank, prefix: Float[Array, "B T D"], starts: Bool[Array, ""] | bool) -> Bank:
    """`bank` with `prefix` behind its sums, where a new block `starts`; otherwise as it is."""
    if starts is False:
        return bank
    new = prefix if starts is True else jnp.where(starts, prefix, bank.sums[bank.held])
    sums = jax.lax.dynamic_update_index_in_dim(bank.sums, new, bank.held, axis=0)
    return Bank(sums, bank.held + (1 if starts is True else starts.astype(jnp.int32)))


def mix_residuals(
    prefix: Float[Array, "B T D"], bank: Bank, proj: Float[Array, " D"], norm: Float[Array, " D"], eps: float
) -> Float[Array, "B T D"]:
    """`Σ softmax(score)·v` over v = bank, then prefix, with `score = Σ_D v·rsqrt(mean(v²)+eps)·(norm·proj)`.

    The entries are weighed by their normalised selves and mixed as they are. Scores, softmax and sum in
    float32, the result in the dtype of `prefix`.
    """
    sums = bank.sums[: bank.held] if isinstance(bank.held, int) else bank.sums
    wide_sums, wide_prefix = at_least_float32(sums), at_least_float32(prefix)
    weight = norm.astype(wide_prefix.dtype) * proj.astype(wide_prefix.dtype)

    def score(entry: Array) -> Array:
        unit = entry * jax.lax.rsqrt(jnp.mean(entry * entry, axis=-1, keepdims=True) + eps)
        return jnp.sum(unit * along_last(weight, unit), axis=-1)

    held = (jnp.arange(sums.shape[0]) < bank.held)[:, None, None]
    scores = jnp.concatenate([jnp.where(held, score(wide_sums), -jnp.inf), score(wide_prefix)[None]])
    shares = jax.nn.softmax(scores, axis=0)[..., None]
    return (jnp.sum(shares[:-1] * wide_sums, axis=0) + shares[-1] * wide_prefix).astype(prefix.dtype)
