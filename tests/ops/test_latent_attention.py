"""The three forms of attention over cached latents against a float64 loop with expanded keys."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.latent_attention import decode_attention, filled_blocks, prefill_attention, sparse_attention

B, T, N, H, R, C, V = 2, 4, 3, 8, 5, 16, 6
# Capacity, and each row's query positions: inside one block, at the borders of blocks of 256, at the end.
PLACES = {
    20: [[0, 1, 7, 19], [19, 3, 3, 0]],
    300: [[0, 255, 256, 299], [5, 43, 44, 298]],
    700: [[511, 512, 513, 699], [0, 188, 444, 600]],
}


def sparse_over_everything(q, latents, w_key, w_value, positions, _, down=None):
    """The sparse form with every cached entry among the chosen ones."""
    chosen = jnp.broadcast_to(latents[:, None], (q.shape[0], q.shape[1], *latents.shape[1:]))
    real = jnp.arange(latents.shape[1])[None, None] <= positions[:, :, None]
    return sparse_attention(q, chosen, real, w_key, w_value, down=down)


FORMS = {
    "prefill": jax.jit(prefill_attention),
    "decode": jax.jit(decode_attention),
    "sparse": jax.jit(sparse_over_everything),
}


@cache
def inputs(capacity):
    rng = np.random.default_rng(capacity)
    shapes = (B, T, N, H + R), (B, capacity, C + R), (N, H, C), (N, V, C)
    q, latents, w_key, w_value = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return q, latents, w_key, w_value, np.array(PLACES[capacity], np.int32)


def loop(q, latents, w_key, w_value, positions, since=None):
    """Token by token and head by head, keys and values expanded, scale (H + R)^-1/2."""
    q, latents, w_key, w_value = (np.asarray(x, np.float64) for x in (q, latents, w_key, w_value))
    out = np.empty((*q.shape[:3], w_value.shape[1]))
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = latents[b, 0 if since is None else since[b, t] : positions[b, t] + 1]
        keys = np.concatenate([seen[:, :C] @ w_key[n].T, seen[:, C:]], axis=1)
        scores = keys @ q[b, t, n] / np.sqrt(H + R)
        share = np.exp(scores - scores.max())
        out[b, t, n] = (share / share.sum()) @ (seen[:, :C] @ w_value[n].T)
    return out


def assert_close(actual, wanted, tolerance=1e-5):
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("capacity", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_loop(form, capacity):
    arguments = inputs(capacity)
    blocks = filled_blocks(capacity, capacity)
    assert_close(FORMS[form](*arguments, blocks), loop(*arguments))


SINCE = {300: [[0, 255, 200, 257], [5, 0, 1, 280]], 700: [[255, 256, 513, 600], [0, 100, 444, 1]]}


@pytest.mark.parametrize("capacity", SINCE)
def test_prefill_sees_nothing_before_a_document(capacity):
    """Documents begin in the block of their token or in one before it, at the token itself or at 0."""
    arguments, since = inputs(capacity), np.array(SINCE[capacity], np.int32)
    found = FORMS["prefill"](*arguments, filled_blocks(capacity, capacity), since=since)
    assert_close(found, loop(*arguments, since))


@pytest.mark.parametrize("factor", [30.0, 1000.0])
@pytest.mark.parametrize("form", FORMS)
def test_large_scores(form, factor):
    """Scores in the hundreds and tens of thousands, the largest in any block."""
    q, *rest = inputs(700)
    q = (q * factor).astype(np.float32)
    assert_close(FORMS[form](q, *rest, filled_blocks(700, 700)), loop(q, *rest), 1e-6 * factor)


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_a_cache_is_read_as_far_as_it_is_filled(form):
    """Filled to 300 of 700: blocks behind hold NaN, and the rest of the second block what an earlier user left."""
    q, latents, w_key, w_value, _ = inputs(700)
    positions = np.array(PLACES[300], np.int32)
    wanted = loop(q, latents, w_key, w_value, positions)
    latents = latents.copy()
    latents[:, 300:512], latents[:, 512:] = 1e4, np.nan
    blocks = filled_blocks(300, 700)
    assert blocks == 2
    assert_close(FORMS[form](q, latents, w_key, w_value, positions, blocks), wanted)


@pytest.mark.parametrize(
    ("length", "capacity", "blocks"),
    [(1, 700, 1), (256, 700, 1), (257, 700, 2), (700, 700, 3), (3, 20, 1), (20, 20, 1)],
)
def test_filled_blocks(length, capacity, blocks):
    assert filled_blocks(length, capacity) == blocks
    assert int(filled_blocks(jnp.array(length), capacity)) == blocks


@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_earlier_tokens_does_not_matter(form):
    """Nothing is rotated: cached entries do not depend on their place."""
    q, latents, w_key, w_value, _ = inputs(300)
    last = np.full((B, T), 299, np.int32)
    order = np.append(np.random.default_rng(0).permutation(299), 299)
    straight = FORMS[form](q, latents, w_key, w_value, last, 2)
    assert_close(FORMS[form](q, latents[:, order], w_key, w_value, last, 2), np.asarray(straight))


@pytest.mark.parametrize("form", FORMS)
def test_the_extra_width_counts(form):
    """With W_k zero only the unrotated part of query and entry decides: here it singles out one position a row."""
    q, latents, w_key, w_value, _ = inputs(300)
    q, latents = q.copy(), latents.copy()
    q[..., H:], latents[..., C:] = 100, 0
    latents[0, 77, C:], latents[1, 290, C:] = 1, 1
    found = FORMS[form](q, latents, np.zeros_like(w_key), w_value, np.full((B, T), 299, np.int32), 2)
    for row, place in enumerate((77, 290)):
        wanted = np.einsum("nvc,c->nv", w_value.astype(np.float64), latents[row, place, :C])
        assert_close(found[row], np.broadcast_to(wanted, (T, N, V)))


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_bfloat16_sums_over_many_entries_in_float32(form):
    """700 equal entries: a running sum kept in bfloat16 stops growing at 256."""
    q, latents, w_key, w_value, _ = inputs(700)
    q, latents = jnp.zeros(q.shape, jnp.bfloat16), jnp.ones(latents.shape, jnp.bfloat16)
    w_value = jnp.asarray(w_value, jnp.bfloat16)
    last = jnp.full((B, T), 699)
    found = FORMS[form](q, latents, jnp.asarray(w_key, jnp.bfloat16), w_value, last, 3)
    assert found.dtype == jnp.bfloat16
    wanted = np.asarray(w_value, np.float64).sum(axis=-1)
    assert_close(np.asarray(found, np.float64), np.broadcast_to(wanted, found.shape), 2e-2)


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_beside_the_matrices_is_as_one_added_to_them(form):
    q, latents, w_key, w_value, positions = inputs(300)
    rng, rank = np.random.default_rng(1), 3
    down = rng.normal(size=(rank, C)).astype(np.float32)
    up_key, up_value = (rng.normal(size=(N, size, rank)).astype(np.float32) for size in (H, V))
    wanted = loop(q, latents, w_key + up_key @ down, w_value + up_value @ down, positions)
    wide = (np.concatenate(pair, axis=-1) for pair in ((w_key, up_key), (w_value, up_value)))
    found = FORMS[form](q, latents, *wide, positions, filled_blocks(300, 300), down=down)
    assert_close(found, wanted)


@pytest.mark.parametrize("since", [[[0] * T] * B, SINCE[300]], ids=["from 0 on", "documents"])
def test_prefill_has_the_gradients_of_plain_attention(since):
    """With a Python number of blocks, over a cache that is no multiple of the block."""
    *arrays, positions = inputs(300)
    since = np.array(since, np.int32)
    cotangent = np.random.default_rng(0).normal(size=(B, T, N, V)).astype(np.float32)

    def plain(q, latents, w_key, w_value):
        key = jnp.einsum("bsc,nhc->bsnh", latents[..., :C], w_key)
        scores = jnp.einsum("btnh,bsnh->btns", q[..., :H], key)
        scores = (scores + jnp.einsum("btnr,bsr->btns", q[..., H:], latents[..., C:])) / np.sqrt(np.float32(H + R))
        place = np.arange(300)
        seen = ((place <= positions[:, :, None]) & (place >= since[:, :, None]))[:, :, None]
        share = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("btns,bsc,nvc->btnv", share, latents[..., :C], w_value)

    def blocked(*arrays):
        return prefill_attention(*arrays, jnp.asarray(positions), filled_blocks(300, 300), since=jnp.asarray(since))

    def gradients(form):
        gradient = jax.grad(lambda *arrays: jnp.sum(form(*arrays) * cotangent), argnums=range(4))
        return jax.jit(gradient, compiler_options={"xla_backend_optimization_level": 0})(*arrays)

    for found, wanted in zip(gradients(blocked), gradients(plain), strict=True):
        assert_close(found, np.asarray(wanted))
