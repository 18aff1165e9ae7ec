from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.indexer import choose_positions, index_scores, indexed_attention
from kimi_jax.ops.latent_attention import prefill_attention

G, K = 3, 8  # index heads and their width
B, T, S, TOP = 2, 6, 40, 7

choose = jax.jit(choose_positions, static_argnums=5)
attend = jax.jit(indexed_attention, static_argnums=9)


def index_inputs(batch, tokens, capacity):
    rng = np.random.default_rng(capacity)
    shapes = (batch, tokens, G, K), (batch, capacity, K), (batch, tokens, G)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def loop_scores(q, k, weight):
    """`[B, T, S]`, head by head in float64."""
    q, k, weight = (np.asarray(x, np.float64) for x in (q, k, weight))
    scores = np.zeros((*q.shape[:2], k.shape[1]))
    for b, t, h in np.ndindex(q.shape[:3]):
        scores[b, t] += weight[b, t, h] * np.maximum(k[b] @ q[b, t, h], 0)
    return scores


def loop_choice(scores, positions, top_k, since=None):
    """A set of positions for each row and token: sorted by falling score, of equal ones the lower first."""
    since = np.zeros_like(positions) if since is None else since
    return [
        [
            set(sorted(range(start, at + 1), key=lambda s: -row[s])[:top_k])
            for row, at, start in zip(rows, places, starts, strict=True)
        ]
        for rows, places, starts in zip(scores, positions, since, strict=True)
    ]


def chosen_sets(index, real):
    """The real ones of `choose_positions`, as `loop_choice` gives them."""
    index, real = np.asarray(index), np.asarray(real)
    sets = [[set(i[r].tolist()) for i, r in zip(*row, strict=True)] for row in zip(index, real, strict=True)]
    assert [[len(s) for s in row] for row in sets] == real.sum(axis=-1).tolist()  # no position twice
    return sets


POSITIONS = np.array([[0, 1, 5, 6, 7, 39], [39, 20, 6, 3, 0, 30]], np.int32)


def test_scores_equal_the_loop():
    q, k, weight = index_inputs(B, T, S)
    wanted = loop_scores(q, k, weight)
    found = index_scores(*map(jnp.asarray, (q, k, weight)))
    np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("top_k", [1, TOP, 39, 40, 100])
def test_choice_equals_brute_force(top_k):
    """Early tokens have fewer positions than `top_k` to choose from; heads count positively or negatively."""
    q, k, weight = index_inputs(B, T, S)
    index, real = choose(q, k, weight, POSITIONS, S, top_k)
    assert index.shape == real.shape == (B, T, min(top_k, S))
    assert chosen_sets(index, real) == loop_choice(loop_scores(q, k, weight), POSITIONS, top_k)


SINCE = np.array([[0, 1, 2, 0, 7, 20], [30, 0, 6, 1, 0, 25]], np.int32)


@pytest.mark.parametrize("top_k", [TOP, 100])
def test_only_positions_of_the_document_are_chosen(top_k):
    q, k, weight = index_inputs(B, T, S)
    index, real = choose(q, k, weight, POSITIONS, None, top_k, since=SINCE)
    assert chosen_sets(index, real) == loop_choice(loop_scores(q, k, weight), POSITIONS, top_k, SINCE)


def test_the_token_itself_is_not_forced():
    """Every key but the token's own likes the query."""
    k = np.ones((1, S, K), np.float32)
    k[0, 20] = -1
    index, real = choose(np.ones((1, 1, G, K), np.float32), k, np.ones((1, 1, G), np.float32), np.array([[20]]), S, 20)
    assert chosen_sets(index, real) == [[set(range(20))]]


def test_of_equal_scores_the_lower_position_wins():
    q, k, weight = index_inputs(1, 1, S)
    index, real = choose(q, k, np.zeros_like(weight), np.array([[30]]), S, TOP)
    assert chosen_sets(index, real) == [[set(range(TOP))]]


def test_bfloat16_scores_are_float32():
    """Scores 256 and 257 differ in float32 only."""
    q = jnp.array([256.0, 1.0], jnp.bfloat16).reshape(1, 1, 1, 2)
    k = jnp.array([[[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]], jnp.bfloat16)
    scores = index_scores(q, k, jnp.ones((1, 1, 1), jnp.bfloat16))
    assert scores.dtype == jnp.float32
    assert scores.tolist() == [[[256, 257, 0]]]


# With attention. More than one block of tokens (16) and of keys (1024), neither divides.

LONG = 1500
N, H, R, C, V = 2, 6, 3, 8, 5


@pytest.fixture(scope="module")
def long():
    """The four arrays of attention and the three of the indexer: one row, 20 tokens, 1500 places."""
    rng = np.random.default_rng(0)
    shapes = (1, 20, N, H + R), (1, LONG, C + R), (N, H, C), (N, V, C)
    return *(rng.normal(size=shape).astype(np.float32) for shape in shapes), *index_inputs(1, 20, LONG)


def loop_attention(q, latents, w_key, w_value, chosen):
    q, latents, w_key, w_value = (np.asarray(x, np.float64) for x in (q, latents, w_key, w_value))
    out = np.empty((*q.shape[:3], w_value.shape[1]))
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = latents[b, sorted(chosen[b][t])]
        scores = np.concatenate([seen[:, :C] @ w_key[n].T, seen[:, C:]], axis=1) @ q[b, t, n] / np.sqrt(H + R)
        share = np.exp(scores - scores.max())
        out[b, t, n] = (share / share.sum()) @ (seen[:, :C] @ w_value[n].T)
    return out


@pytest.mark.parametrize(
    ("start", "length"), [(LONG - 20, LONG), (1040, 1060), (1010, 1030), (0, 20)], ids=lambda x: str(x)
)
def test_attention_sees_only_the_chosen_positions(long, start, length):
    """Filled to `length`; behind it the index keys are NaN and the latents large."""
    q, latents, w_key, w_value, index_q, index_k, index_weight = long
    positions = np.arange(start, start + 20, dtype=np.int32)[None]
    chosen = loop_choice(loop_scores(index_q, index_k, index_weight), positions, 64)
    wanted = loop_attention(q, latents, w_key, w_value, chosen)
    latents, index_k = latents.copy(), index_k.copy()
    latents[:, length:], index_k[:, length:] = 1e4, np.nan
    found = attend(q, latents, w_key, w_value, index_q, index_k, index_weight, positions, length, 64)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_attention_sees_nothing_of_another_document(long):
    """More tokens than attend at a time, each with a document that began 0 to 190 places before it."""
    positions = np.arange(LONG - 20, LONG, dtype=np.int32)[None]
    since = positions - 10 * np.arange(20, dtype=np.int32)[None]
    chosen = loop_choice(loop_scores(*long[4:]), positions, 64, since)
    found = attend(*long, positions, LONG, 64, since=since)
    wanted = loop_attention(*long[:4], chosen)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("top_k", [S, 2048])
def test_at_most_top_k_positions_are_dense_attention(long, top_k):
    q, latents, w_key, w_value, index_q, index_k, index_weight = long
    latents, index_k = latents[:, :S], index_k[:, :S]
    positions = np.arange(S - 20, S, dtype=np.int32)[None]
    found = attend(q, latents, w_key, w_value, index_q, index_k, index_weight, positions, S, top_k)
    dense = jax.jit(partial(prefill_attention, num_blocks=1))(q, latents, w_key, w_value, positions)
    np.testing.assert_allclose(found, dense, atol=1e-5 * float(jnp.abs(dense).max()))


def test_entries_come_straight_from_a_stack_of_layers(long):
    """Of the second of three layers, entries wider than `C + R`: what follows is not read."""
    q, latents, w_key, w_value, index_q, index_k, index_weight = long
    positions = np.arange(LONG - 20, LONG, dtype=np.int32)[None]
    wanted = attend(*long, positions, LONG, 64)
    wide = np.concatenate([latents, np.full_like(latents, np.nan)], axis=-1)
    wide, index_k = (np.stack([np.full_like(x, np.nan), x, np.full_like(x, np.nan)]) for x in (wide, index_k))
    found = attend(q, wide, w_key, w_value, index_q, index_k, index_weight, positions, LONG, 64, layer=np.int32(1))
    np.testing.assert_allclose(found, wanted, atol=1e-6 * float(jnp.abs(wanted).max()))
