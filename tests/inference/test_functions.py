"""Prefill, decode, score and trace: rows, bounds, padding, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from two_layers import two_layers

import kimi_jax as kj
from kimi_jax.inference.arguments import bucket
from kimi_jax.inference.caches import CacheError
from kimi_jax.inference.functions import _forward, _score, extend
from kimi_jax.parallel.mesh import MeshError

pytestmark = pytest.mark.xdist_group("functions")
MODEL = "tiny-k31"  # both kinds of layer, experts and the indexer
ROWS, CAPACITY = 4, 40
PROMPTS = [[5, 17, 130, 44, 9], [7], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40], [2, 2, 2]]


@pytest.fixture(scope="module")
def model(tiny):
    return two_layers(tiny(MODEL))


def padded(rows):
    width = max(len(row) for row in rows)
    return np.asarray([list(row) + [0] * (width - len(row)) for row in rows]), [len(row) for row in rows]


def filled(model):
    return kj.prefill(model, *padded(PROMPTS), kj.init_cache(model, ROWS, CAPACITY))


def row_of(cache, row):
    return [np.asarray(x)[row] for x in jax.tree.leaves((cache.layers, cache.lengths))]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_buckets():
    lengths = (0, 1, 2, 16, 17, 64, 65, 1024, 1025, 4097)
    assert [bucket(t) for t in lengths] == [1, 1, 16, 16, 64, 64, 256, 1024, 2048, 5120]


def test_inactive_and_empty_rows_stay_untouched_and_get_zeros(model):
    _, cache = filled(model)
    before = [row_of(cache, row) for row in range(ROWS)]
    logits, cache = kj.decode(model, [1, 2, 3, 4], cache, active=[True, False, True, False])
    for row, active in enumerate([True, False, True, False]):
        assert same(row_of(cache, row), before[row]) != active
        assert bool(np.any(np.asarray(logits)[row])) == active
    logits, cache = kj.prefill(model, np.ones((ROWS, 7), int), [0, 0, 7, 0], cache)
    assert same(row_of(cache, 1), before[1])
    assert np.flatnonzero(np.any(np.asarray(logits), axis=1)).tolist() == [2]


def test_a_row_that_would_pass_the_end_gets_nan_and_keeps_its_cache(model):
    _, cache = filled(model)
    long = np.ones((ROWS, CAPACITY - 5), int)
    logits, cache = kj.prefill(model, long, [0, 0, CAPACITY - 11, 0], cache)  # fills row 2 to the last place
    assert cache.lengths.tolist() == [5, 1, CAPACITY, 3]
    assert np.all(np.isfinite(logits))
    full = row_of(cache, 2)
    logits, cache = kj.decode(model, [1, 2, 3, 4], cache)
    assert np.all(np.isnan(logits[2]))
    assert np.all(np.isfinite(np.asarray(logits)[[0, 1, 3]]))
    assert same(row_of(cache, 2), full)
    assert cache.lengths.tolist() == [6, 2, CAPACITY, 4]
    logits, cache = kj.prefill(model, long, [CAPACITY - 5, 1, 0, 2], cache)  # one too many in row 0
    assert np.isnan(np.asarray(logits)).all(axis=1).tolist() == [True, False, False, False]
    assert cache.lengths.tolist() == [6, 3, CAPACITY, 6]


def test_padding_leaves_no_trace(model):
    """The last place of a row is written by its own token, whatever the padding behind it is."""
    tokens, lengths = padded(PROMPTS)
    noisy = np.where(np.arange(tokens.shape[1])[None, :] < np.asarray(lengths)[:, None], tokens, 511)
    logits, cache = kj.prefill(model, tokens, lengths, kj.init_cache(model, ROWS, CAPACITY))
    other_logits, other = kj.prefill(model, noisy, lengths, kj.init_cache(model, ROWS, CAPACITY))
    np.testing.assert_array_equal(logits, other_logits)
    assert all(same(row_of(cache, row), row_of(other, row)) for row in range(ROWS))
    beyond = np.asarray(cache.layers[1].latents)[1, 1:]
    assert not np.any(beyond)


def test_convolution_tail_of_a_one_token_prompt(model):
    _, cache = filled(model)
    tail = np.asarray(cache.layers[0].conv_tail)[1]
    assert not np.any(tail[:2])
    assert np.any(tail[2])


def test_states_are_float32_and_the_rest_is_of_the_compute_dtype(tiny):
    cache = kj.init_cache(tiny(MODEL, dtype="bfloat16"), 1, 8)
    assert cache.layers[0].state.dtype == jnp.float32
    assert cache.layers[0].conv_tail.dtype == jnp.bfloat16
    assert cache.layers[2].latents.dtype == cache.layers[2].index_keys.dtype == jnp.bfloat16


def test_a_new_prompt_length_compiles_nothing(model):
    _, cache = filled(model)
    _, cache = kj.decode(model, [1, 2, 3, 4], cache)
    before = extend._cache_size()
    for length in (2, 3, 9, 16):
        _, cache = kj.prefill(model, np.ones((ROWS, length), int), [1, 0, 1, 0], cache)
        _, cache = kj.decode(model, [1, 2, 3, 4], cache, active=[False, True, False, True])
    assert extend._cache_size() == before


def test_score_is_the_log_softmax_of_forward(model):
    tokens, lengths = padded(PROMPTS)
    logp = np.asarray(jax.nn.log_softmax(kj.forward(model, tokens, lengths), axis=-1))
    scores = np.asarray(kj.score(model, tokens, lengths))
    assert scores.shape == (ROWS, tokens.shape[1] - 1)
    for row, prompt in enumerate(PROMPTS):
        want = [logp[row, t, prompt[t + 1]] for t in range(len(prompt) - 1)]
        np.testing.assert_allclose(scores[row, : len(prompt) - 1], want, atol=2e-5)
        assert not np.any(scores[row, len(prompt) - 1 :])


def test_large_buffers_do_not_exist(model):
    """Prefill has no [T, T] scores, score no [B, T, W] logits; forward does have logits, as it should."""
    width, counts = 1024, np.asarray([1024], np.int32)
    tokens = np.zeros((1, width), np.int32)
    logits = f"tensor<1x{width}x{model.config.vocab_size}xf32>"
    assert logits in _forward.lower(model.spec, model.params, tokens, counts).as_text()
    assert logits not in _score.lower(model.spec, model.params, tokens, counts).as_text()


def test_prefill_scores_exist_a_block_at_a_time(tiny):
    model, width = two_layers(tiny("tiny-k3")), 1024
    tokens, counts = np.zeros((1, width), np.int32), np.asarray([1024], np.int32)
    text = extend.lower(model.spec, model.params, tokens, counts, kj.init_cache(model, 1, 2048)).as_text()
    heads = model.config.mla.num_heads
    assert f"tensor<1x{width}x{heads}x256xf32>" in text
    for keys in (width, 2 * width):
        assert not any(f"{a}x{b}" in text for a, b in ((f"{width}x{heads}", f"{keys}xf32"), (f"{heads}x{width}", keys)))


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([[1, 512]] * ROWS, [2] * ROWS, r"token id 512 is outside the vocabulary of 512 \(0 to 511\)"),
        ([[1, -1]] * ROWS, [2] * ROWS, "token id -1 is outside the vocabulary"),
        ([[1.5, 2]] * ROWS, [2] * ROWS, "tokens must be whole numbers, found float64"),
        ([[1, 2], [1], [1], [1]], [2, 1, 1, 1], "must be rectangular: pad the rows"),
        ([1, 2, 3, 4], [1] * ROWS, r"tokens must have the shape \[B, T\], found \[4\]"),
        ([[1, 2]] * ROWS, [3, 1, 1, 1], "between 0 and the 2 tokens given a row, found 3"),
        ([[1, 2]] * ROWS, [-1, 1, 1, 1], "between 0 and the 2 tokens given a row, found -1"),
        ([[1, 2]] * ROWS, [1, 1], r"lengths must have the shape \[4\], one a row, found \[2\]"),
        ([[1, 2]] * 2, [1, 1], "2 rows of tokens, but the cache has 4"),
    ],
)
def test_bad_prefill_arguments(model, tokens, lengths, message):
    cache = kj.init_cache(model, ROWS, CAPACITY)
    with pytest.raises(ValueError, match=message):
        kj.prefill(model, tokens, lengths, cache)
    assert not cache.lengths.is_deleted()  # a refused call does not take the cache away


def test_bad_decode_arguments(model):
    cache = kj.init_cache(model, ROWS, CAPACITY)
    with pytest.raises(ValueError, match=r"active must be bool \[4\], found int64 \[4\]"):
        kj.decode(model, [1, 2, 3, 4], cache, active=[1, 0, 1, 0])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        kj.decode(model, [1, 2, 3, 10**12], cache)


def test_a_cache_of_another_model_or_dtype_is_refused(model, tiny):
    cache = kj.init_cache(tiny("tiny-k3"), ROWS, CAPACITY)
    with pytest.raises(CacheError, match="another model or dtype"):
        kj.decode(model, [1, 2, 3, 4], cache)
    with pytest.raises(CacheError, match="another model or dtype"):
        kj.decode(model, [1, 2, 3, 4], kj.init_cache(two_layers(tiny(MODEL, dtype="bfloat16")), ROWS, CAPACITY))
    with pytest.raises(CacheError, match="lies on other devices than the model"):
        kj.decode(model, [1, 2, 3, 4], kj.init_cache(two_layers(tiny(MODEL, "data2-tensor2")), ROWS, CAPACITY))


def test_sizes_that_do_not_fit_name_both_numbers(model, tiny):
    with pytest.raises(ValueError, match="between 1 and the model's 4096 positions, found 4097"):
        kj.init_cache(model, 1, 4097)
    sharded = tiny(MODEL, "data2-tensor2")
    for call in (
        lambda: kj.init_cache(sharded, 3, 8),
        lambda: kj.forward(sharded, [[1]] * 3),
        lambda: kj.score(sharded, [[1, 2]] * 3),
        lambda: kj.trace(sharded, [[1]] * 3),
    ):
        with pytest.raises(MeshError, match="a batch of 3 cannot be split over mesh axis 'data' of 2"):
            call()
