"""The k best of a row of scores and where they stand, on TPU without sorting rows of many times k."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from kimi_jax.ops.tpu import LANES

DIGIT = 2
"""Bits of the k-th largest score found in one pass over the scores."""
COUNTED = 64
"""Groups of `LANES` neighbours handled at a time; counts are of groups, and whole groups are looked at again."""
SELECTED_FROM = 16
"""Times k that a row must hold for `select_positions` to do less work than the sort that XLA makes of top-k on TPU."""


def best_positions(
    scores: Float[Array, "*lead S"], k: int, filled: Int[Array, ""] | int | None = None
) -> tuple[Float[Array, "*lead J"], Int[Array, "*lead J"]]:
    """The J = `k` largest of each row's scores and their positions (int32); of equal scores the lower position wins.

    Zeros of either sign are equal. NaN counts as -inf. The order of what is returned depends on sizes and platform;
    equal scores stand in the order of their positions. `filled`: how many leading scores to look at, all by default;
    what lies behind must be -inf.
    """
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, jnp.where(scores == 0, jnp.zeros_like(scores), scores))
    if scores.shape[-1] < SELECTED_FROM * k:
        return _top_k(scores, k)
    filled = jnp.asarray(scores.shape[-1] if filled is None else filled, jnp.int32)

    def select(scores: Array, filled: Array) -> tuple[Array, Array]:
        return select_positions(scores, k, filled)

    return jax.lax.platform_dependent(scores, filled, tpu=select, default=lambda scores, _: _top_k(scores, k))


def select_positions(
    scores: Float[Array, "*lead S"], k: int, filled: Int[Array, ""] | int
) -> tuple[Float[Array, "*lead J"], Int[Array, "*lead J"]]:
    """As `best_positions`, of scores without NaN and -0, in the order of the positions.

    The k-th largest score is found digit by digit of its bits, each by a pass that counts. Counts of the chosen in
    groups of `LANES` neighbours then tell the group of the j-th chosen; only those groups are looked at.
    """
    lead, capacity = scores.shape[:-1], scores.shape[-1]
    size = min(max(COUNTED, -(-k // LANES)), -(-capacity // LANES))  # the first part alone holds k
    pad = -capacity % (size * LANES)
    if pad:
        scores = jnp.pad(scores, [(0, 0)] * len(lead) + [(0, pad)], constant_values=-jnp.inf)
    groups = scores.reshape((-1, scores.shape[-1] // LANES, LANES))
    parts = jnp.clip(-(-filled // (size * LANES)), 1, groups.shape[1] // size)
    limit = _kth_largest(groups, k, size, parts)[:, None, None]

    def counts(keys: Array, first: Array, counted: tuple[Array, Array]) -> tuple[Array, Array]:
        above, equal = _count(keys > limit), _count(keys == limit)
        put = jax.lax.dynamic_update_slice_in_dim
        return put(counted[0], above, first, axis=1), put(counted[1], equal, first, axis=1)

    none = jnp.zeros(groups.shape[:2], jnp.int32)
    above, equal = _over_parts(groups, size, parts, counts, (none, none))
    # Of those that equal the limit the first ones, as many as are wanted.
    wanted = k - jnp.sum(above, axis=1, keepdims=True, dtype=jnp.int32)
    before = jnp.cumsum(equal, axis=1, dtype=jnp.int32) - equal
    taken = jnp.clip(wanted - before, 0, equal)
    until = jnp.cumsum(above + taken, axis=1, dtype=jnp.int32)

    rank = jnp.arange(k, dtype=jnp.int32)[None, :]
    group = _count(until[:, None, :] <= rank[:, :, None])
    rank = rank - jnp.take_along_axis(until - above - taken, group, axis=1)
    looked = _ordered(jnp.take_along_axis(groups, group[:, :, None], axis=1))
    is_equal = looked == limit
    few = jnp.take_along_axis(taken, group, axis=1)[:, :, None]
    chosen = (looked > limit) | (is_equal & (_running(is_equal) <= few))
    lane = _count(_running(chosen) <= rank[:, :, None])
    here = jnp.arange(LANES, dtype=jnp.int32)[None, None, :] == lane[:, :, None]
    best = jnp.max(jnp.where(here, looked, jnp.zeros_like(looked)), axis=-1)
    return _scores(best, scores.dtype).reshape((*lead, k)), (group * LANES + lane).reshape((*lead, k))


def _top_k(scores: Array, k: int) -> tuple[Array, Array]:
    best, index = jax.lax.top_k(scores, k)
    return best, index


def _kth_largest(groups: Float[Array, "M P L"], k: int, size: int, parts: Int[Array, ""]) -> UInt[Array, " M"]:
    """`_ordered` of the `k`-th largest score of each row's first `parts` parts of `size` groups."""
    bits = 8 * groups.dtype.itemsize
    unsigned = _ordered(groups[:0]).dtype
    digits = jnp.arange(1, 2**DIGIT, dtype=unsigned)

    def one_digit(i: Array, found: Array) -> Array:
        shift = (bits - DIGIT * (i + 1)).astype(unsigned)
        tried = found[:, None] | (digits << shift)[None, :]

        def count(keys: Array, _: Array, counted: Array) -> Array:
            reached = keys[:, None] >= tried[:, :, None, None]
            return counted + jnp.sum(reached, axis=(2, 3), dtype=jnp.int32)

        counted = _over_parts(groups, size, parts, count, jnp.zeros(tried.shape, jnp.int32))
        return found | (jnp.sum(counted >= k, axis=1, dtype=unsigned) << shift)

    return jax.lax.fori_loop(0, bits // DIGIT, one_digit, jnp.zeros(groups.shape[0], unsigned))


def _over_parts(
    groups: Array, size: int, parts: Array, body: Callable[[Array, Array, Any], Any], start: Array | tuple[Array, ...]
) -> Any:
    """`body(keys, first, carry)` for one part of `size` groups after the other, the first of them `first`."""

    def one_part(j: Array, carry: Any) -> Any:
        part = jax.lax.dynamic_slice_in_dim(groups, j * size, size, axis=1)
        return body(_ordered(part), j * size, carry)

    return jax.lax.fori_loop(0, parts, one_part, start)


def _ordered(scores: Array) -> Array:
    """Unsigned integers in the order of the scores, all above 0."""
    bits = jax.lax.bitcast_convert_type(scores, f"uint{8 * scores.dtype.itemsize}")
    sign = jnp.array(1 << (8 * scores.dtype.itemsize - 1), bits.dtype)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _scores(keys: Array, dtype: jnp.dtype) -> Array:
    """The scores that `_ordered` made `keys` of."""
    sign = jnp.array(1 << (8 * keys.dtype.itemsize - 1), keys.dtype)
    return jax.lax.bitcast_convert_type(jnp.where(keys >= sign, keys ^ sign, ~keys), dtype)


def _count(true: Array) -> Array:
    return jnp.sum(true, axis=-1, dtype=jnp.int32)


def _running(true: Array) -> Array:
    """How many are true up to each of the last axis' `LANES` entries, itself included: a product, exact."""
    before = jnp.triu(jnp.ones((LANES, LANES), jnp.float32))
    return jnp.einsum("mkl,ln->mkn", true.astype(jnp.float32), before).astype(jnp.int32)
