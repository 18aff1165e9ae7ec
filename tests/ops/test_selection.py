from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.selection import best_positions, select_positions

select = jax.jit(select_positions, static_argnums=1)
by_rule = jax.jit(best_positions, static_argnums=1)


def stable_sort(scores, k):
    """Positions of the k largest, in the order of the positions: a stable sort by falling score."""
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :k], axis=-1)


def check(found, scores, k):
    best, index = (np.asarray(x) for x in found)
    order = np.argsort(index, axis=-1)
    np.testing.assert_array_equal(np.take_along_axis(index, order, -1), stable_sort(scores, k))
    np.testing.assert_array_equal(best, np.take_along_axis(scores, index, -1))
    assert (best.dtype, index.dtype) == (scores.dtype, np.int32)


def rows(size, dtype=np.float32):
    """`[7, 1, size]`, rows to get wrong: all exponents, few values, one value, all or nearly all -inf."""
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        spread = (rng.normal(size=size) * np.exp(rng.uniform(-80, 80, size))).astype(dtype)
    few = rng.integers(-2, 3, size).astype(dtype)
    same = np.full(size, -3, dtype)
    nothing = np.full(size, -np.inf, dtype)
    one = nothing.copy()
    one[-1] = -1e30
    late = np.where(np.arange(size) < size // 2, dtype(-1), dtype(1))
    infinite = few.copy()
    infinite[::3] = np.inf
    return np.stack([spread, few, same, nothing, one, late, infinite])[:, None]


@pytest.mark.parametrize(("size", "k"), [(40, 40), (1500, 129), (9000, 8_500), (20_000, 300)])
def test_selection_equals_a_stable_sort(size, k):
    """One part of the row or several, rows that are no multiple of a part, all of a row, parts no smaller than k."""
    scores = rows(size)
    check(select(scores, k, size), scores, k)


def test_only_what_is_filled_is_looked_at():
    """8,192 scores are a part: of 20,000 the first 100 are there, the rest -inf; nothing at all is there."""
    scores = rows(20_000)
    for filled in (100, 8_192, 8_193):
        scores[..., filled:] = -np.inf
        check(select(scores, 300, filled), scores, 300)
    for filled in (0, -5):
        best, index = select(np.full_like(scores, -np.inf), 300, filled)
        assert np.all(np.isneginf(best))
        assert np.all(np.asarray(index) == np.arange(300))


def test_float64_scores_differ_behind_float32():
    with jax.enable_x64(True):
        scores = rows(1500, np.float64)
        scores = np.concatenate([scores, 1 + np.arange(1500)[None, None, ::-1] * 1e-12])
        check(jax.jit(partial(select_positions, k=30, filled=1500))(jnp.asarray(scores)), scores, 30)


@pytest.mark.parametrize("size", [40, 400], ids=["sorted", "by platform"])
def test_zeros_of_either_sign_are_equal(size):
    """`w·ReLU(…)` is -0 where w is negative: 0 at a higher position must not win."""
    scores = np.full((1, size), -1, np.float32)
    scores[0, 5:30] = np.where(np.arange(25) % 2, 0.0, -0.0)
    best, index = by_rule(scores, 10)
    assert sorted(np.asarray(index)[0].tolist()) == list(range(5, 15))
    assert not np.any(np.signbit(best))


@pytest.mark.parametrize("size", [40, 400], ids=["sorted", "by platform"])
def test_nan_is_never_among_the_best(size):
    scores = np.tile(np.array([np.nan, 1, -np.nan, 2], np.float32), size // 4)[None]
    best, index = by_rule(scores, 20)
    assert np.all(np.isfinite(best))
    assert np.all(np.asarray(index) % 2 == 1)


def test_selection_is_what_a_tpu_gets_for_long_rows():
    """Sixteen times k: no sort in the program for TPU, one in the program for others and for shorter rows."""

    def program(size, platform):
        traced = jax.jit(partial(best_positions, k=8)).trace(jax.ShapeDtypeStruct((2, size), jnp.float32))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert ["top_k" in program(size, platform) for size, platform in ((128, "tpu"), (127, "tpu"), (128, "cpu"))] == [
        False,
        True,
        True,
    ]
