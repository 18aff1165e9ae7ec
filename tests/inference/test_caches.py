"""Copying, clearing, saving and loading caches, and random sequences of everything."""

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from two_layers import two_layers

import kimi_jax as kj
from kimi_jax.inference.caches import CacheError

pytestmark = pytest.mark.xdist_group("functions")
MODEL, ROWS, CAPACITY, PIECE = "tiny-k31", 4, 40, 16


@pytest.fixture(scope="module")
def model(tiny):
    return two_layers(tiny(MODEL))


@pytest.fixture(scope="module")
def looped(tiny):
    """Six layers, four of them as two rounds of a loop: their caches are stacks."""
    return tiny(MODEL, loop=True)


def filled(model):
    tokens = np.arange(ROWS * 6).reshape(ROWS, 6)
    return kj.prefill(model, tokens, [6, 2, 0, 5], kj.init_cache(model, ROWS, CAPACITY))[1]


def test_a_copy_survives_the_donation_of_the_original(model):
    cache = filled(model)
    copy = kj.copy_cache(cache)
    for _ in range(3):
        _, cache = kj.decode(model, [1, 2, 3, 4], cache)
    again, _ = kj.decode(model, [1, 2, 3, 4], copy)
    fresh, _ = kj.decode(model, [1, 2, 3, 4], filled(model))
    np.testing.assert_array_equal(again, fresh)


def test_the_cache_passed_in_is_donated(model):
    cache = filled(model)
    kj.decode(model, [1, 2, 3, 4], cache)
    assert all(x.is_deleted() for x in jax.tree.leaves(cache.layers))


@pytest.mark.parametrize("kind", ["model", "looped"])
def test_reset_leaves_nothing_of_a_row_not_even_nan(kind, request):
    cache = filled(request.getfixturevalue(kind))

    def axis(path):
        return -3 if path[-1].name in ("latents", "index_keys") else -4

    def rows(cache):
        """Every array of a layer, with the rows first."""
        leaves = jax.tree_util.tree_leaves_with_path(cache.layers)
        return [np.moveaxis(np.asarray(x), axis(path), 0) for path, x in leaves]

    def poison(path, x):
        return x.at[(..., 0, *[slice(None)] * (-1 - axis(path)))].set(np.nan)

    kept = [x[[1, 2, 3]] for x in rows(cache)]
    poisoned = jax.tree_util.tree_map_with_path(poison, cache.layers)
    cache = kj.reset_rows(type(cache)(poisoned, cache.lengths, cache.identity, CAPACITY), [True, False, False, False])
    assert cache.lengths.tolist() == [0, 2, 0, 5]
    for leaf, rest in zip(rows(cache), kept, strict=True):
        assert not np.any(leaf[0])
        np.testing.assert_array_equal(leaf[[1, 2, 3]], rest)
    with pytest.raises(ValueError, match=r"rows must be bool \[4\]"):
        kj.reset_rows(cache, [0])


def test_a_looped_cache_saved_and_loaded(looped, tiny, tmp_path):
    cache = filled(looped)
    kj.save_cache(tmp_path / "cache", cache)
    loaded = kj.load_cache(tmp_path / "cache", looped)
    again, _ = kj.decode(looped, [1, 2, 3, 4], loaded)
    want, _ = kj.decode(looped, [1, 2, 3, 4], cache)
    np.testing.assert_array_equal(again, want)
    with pytest.raises(CacheError, match="another layout"):
        kj.load_cache(tmp_path / "cache", tiny(MODEL))


def test_saved_and_loaded(model, tiny, tmp_path):
    cache = filled(model)
    kj.save_cache(tmp_path / "cache", cache)
    for mesh in ("one", "data2-tensor2"):
        loaded = kj.load_cache(tmp_path / "cache", two_layers(tiny(MODEL, mesh)))
        assert loaded.max_len == CAPACITY
        for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(loaded), strict=True):
            np.testing.assert_array_equal(a, b)
    once, _ = kj.decode(model, [1, 2, 3, 4], kj.load_cache(tmp_path / "cache", model))
    want, _ = kj.decode(model, [1, 2, 3, 4], cache)
    np.testing.assert_array_equal(once, want)


def test_bfloat16_survives_saving(tiny, tmp_path):
    model = tiny(MODEL, dtype="bfloat16")
    cache = jax.tree.map(lambda x: (x + 1).astype(x.dtype), kj.init_cache(model, 1, 4))
    cache = type(cache)(cache.layers, cache.lengths * 4, cache.identity - 1, 4)
    kj.save_cache(tmp_path / "cache", cache)
    loaded = kj.load_cache(tmp_path / "cache", model)
    assert [x.dtype for x in jax.tree.leaves(loaded)] == [x.dtype for x in jax.tree.leaves(cache)]
    assert np.all(np.asarray(loaded.layers[2].latents, np.float32) == 1)


def test_foreign_and_damaged_cache_files_are_refused(model, tiny, tmp_path):
    path = tmp_path / "cache"
    kj.save_cache(path, filled(model))
    with pytest.raises(CacheError, match=r"another layout: layers\.1\.latents is .*this model wants None"):
        kj.load_cache(path, tiny("tiny-k3"))
    with pytest.raises(CacheError, match=r"another layout: layers\.0\.conv_tail is .*float32.*wants .*bfloat16"):
        kj.load_cache(path, two_layers(tiny(MODEL, dtype="bfloat16")))
    norm = {"weight": model.params["norm"]["weight"] * np.asarray(2, model.params["norm"]["weight"].dtype)}
    with pytest.raises(CacheError, match="made by a model with other weights"):
        kj.load_cache(path, model.replace(params={**model.params, "norm": norm}))

    whole = path.read_bytes()
    for damage, message in (
        (whole[:-3], "truncated"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "the checksum of its contents is another"),
        (b"", "truncated or not a safetensors file"),
        (whole.replace(b"kimi_jax cache 1", b"kimi_jax cache 9"), "not a cache of this version"),
    ):
        path.write_bytes(damage)
        with pytest.raises(CacheError, match=message):
            kj.load_cache(path, model)
    path.write_bytes(whole)
    arrays = load_file(path)
    save_file(arrays, path)
    with pytest.raises(CacheError, match="not a cache of this version: format None"):
        kj.load_cache(path, model)


TOKEN = st.integers(0, 511)
OPERATION = st.one_of(
    st.tuples(st.just("prefill"), st.lists(st.lists(TOKEN, max_size=PIECE), min_size=ROWS, max_size=ROWS)),
    st.tuples(st.just("decode"), st.lists(st.none() | TOKEN, min_size=ROWS, max_size=ROWS)),
    st.tuples(st.just("keep"), st.none()),
    st.tuples(st.just("restore"), st.none()),
    st.tuples(st.just("reset"), st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)),
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATION, min_size=1, max_size=7))
def test_every_row_equals_a_run_of_its_own(looped, operations):
    model = looped
    cache, rows, logits = kj.init_cache(model, ROWS, CAPACITY), [[] for _ in range(ROWS)], [None] * ROWS
    kept = (kj.copy_cache(cache), [[] for _ in range(ROWS)], [None] * ROWS)
    for kind, argument in operations:
        if kind == "keep":
            kept = (kj.copy_cache(cache), [list(row) for row in rows], list(logits))
        elif kind == "restore":
            cache, rows, logits = kj.copy_cache(kept[0]), [list(row) for row in kept[1]], list(kept[2])
        elif kind == "reset":
            cache = kj.reset_rows(cache, argument)
            rows = [[] if gone else row for row, gone in zip(rows, argument, strict=True)]
            logits = [None if gone else last for last, gone in zip(logits, argument, strict=True)]
        else:
            if kind == "decode":
                new = [[] if token is None else [token] for token in argument]
                active = [token is not None for token in argument]
                out, cache = kj.decode(model, [token or 0 for token in argument], cache, active)
            else:
                new = argument
                tokens = np.asarray([[*piece, *[0] * (PIECE - len(piece))] for piece in new])
                out, cache = kj.prefill(model, tokens, [len(piece) for piece in new], cache)
            for row, piece in enumerate(new):
                if len(rows[row]) + len(piece) > CAPACITY:
                    assert np.all(np.isnan(out[row]))
                elif piece:
                    rows[row] += piece
                    logits[row] = np.asarray(out[row])
    assert cache.lengths.tolist() == [len(row) for row in rows]
    for row, last in zip(rows, logits, strict=True):
        if row:
            alone = kj.init_cache(model, 1, CAPACITY)
            for start in range(0, len(row), PIECE):
                piece = row[start : start + PIECE]
                tokens = np.asarray([[*piece, *[0] * (PIECE - len(piece))]])
                want, alone = kj.prefill(model, tokens, [len(piece)], alone)
            np.testing.assert_allclose(last, want[0], atol=2e-3, rtol=0)
