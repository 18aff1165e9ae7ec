"""Attention Residuals: a learned mix of the residual stream's saved block sums.

A model has one mix before each attention, one before each MLP and one before its head, each with a query of its own
that no token changes. What a saved sum scores under each of them is therefore computed once, when it is saved; a mix
merges these scores with that of the running sum.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ops.norms import along_last, at_least_float32, unit_rms, wide_dtype


class Bank(NamedTuple):
    """The sums of the blocks before the current one.

    - `sums`: `[R, B, T, D]`, room for every block; what is not held yet is zero.
    - `scores`: `[Q, R, B, T]`, of each sum under each query; minus infinity where none is held.
    - `queries`: `[Q, D]`, of each of the model's mixes; see `mix_query`.
    - `held`: how many sums there are; a Python number where the layer is known while tracing.
    """

    sums: Float[Array, "R B T D"]
    scores: Float[Array, "Q R B T"]
    queries: Float[Array, "Q D"]
    held: Int[Array, ""] | int


def mix_query(norm: Float[Array, "*G D"], proj: Float[Array, "*G 1 D"]) -> Float[Array, "*G D"]:
    """The query of a mix, `norm·proj` in float32 at least: a score is `v·rsqrt(mean(v²)+eps)` times it."""
    return at_least_float32(norm) * at_least_float32(proj[..., 0, :])


def empty_bank(room: int, prefix: Float[Array, "B T D"], queries: Float[Array, "Q D"]) -> Bank:
    """A bank for `room` sums like `prefix`, none held."""
    queries = queries.astype(wide_dtype(prefix.dtype))
    scores = jnp.full((queries.shape[0], room, *prefix.shape[:-1]), -jnp.inf, queries.dtype)
    return Bank(jnp.zeros((room, *prefix.shape), prefix.dtype), scores, queries, 0)


def save_block(bank: Bank, prefix: Float[Array, "B T D"], starts: Bool[Array, ""] | bool, eps: float) -> Bank:
    """`bank` with `prefix` behind its sums, where a new block `starts`; otherwise as it is. `eps`: of its norm."""
    if starts is False:
        return bank

    def scored(prefix: Array) -> Array:
        return jnp.einsum("btd,qd->qbt", unit_rms(prefix, eps), bank.queries, precision=jax.lax.Precision.HIGHEST)

    if starts is True:
        new, scores, held = prefix, scored(prefix), bank.held + 1
    else:
        at = jnp.minimum(bank.held, bank.sums.shape[0] - 1)
        new = jnp.where(starts, prefix, bank.sums[at])
        scores = jax.lax.cond(starts, scored, lambda _: bank.scores[:, at], prefix)
        held = bank.held + starts.astype(jnp.int32)
    sums = jax.lax.dynamic_update_index_in_dim(bank.sums, new, bank.held, axis=0)
    return bank._replace(
        sums=sums, scores=jax.lax.dynamic_update_index_in_dim(bank.scores, scores, bank.held, axis=1), held=held
    )


def mix_residuals(
    prefix: Float[Array, "B T D"],
    bank: Bank,
    number: Int[Array, ""] | int,
    eps: float,
    fresh: Bool[Array, ""] | bool = False,
) -> Float[Array, "B T D"]:
    """`Σ softmax(score)·v` over v = bank, then prefix, with `score = v·rsqrt(mean(v²)+eps)` times a query.

    **Arguments:**

    - `prefix`: the running sum of the current block; left out where it is `fresh` in the bank.
    - `number`: of the mix, a row of `bank.queries`.

    The entries are weighed by their normalised selves and mixed as they are. Scores, softmax and sum in
    float32, the result in the dtype of `prefix`.
    """
    known = isinstance(bank.held, int)
    sums = bank.sums[: bank.held] if known else bank.sums
    scores = jax.lax.dynamic_index_in_dim(bank.scores, number, keepdims=False)[: sums.shape[0]]
    if fresh is True:
        return _mixed(jax.nn.softmax(scores, axis=0), sums).astype(prefix.dtype)
    query = jax.lax.dynamic_index_in_dim(bank.queries, number, keepdims=False)
    unit = unit_rms(prefix, eps)
    own = jnp.sum(unit * along_last(query, unit), axis=-1)
    own = jnp.where(fresh, -jnp.inf, own)
    shares = jax.nn.softmax(jnp.concatenate([scores, own[None]]), axis=0)
    return (_mixed(shares[:-1], sums) + shares[-1][..., None] * at_least_float32(prefix)).astype(prefix.dtype)


def _mixed(shares: Array, sums: Array) -> Array:
    return jnp.sum(shares[..., None] * at_least_float32(sums), axis=0)
