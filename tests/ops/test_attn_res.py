import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.attn_res import empty_bank, mix_query, mix_residuals, save_block

B, T, D, EPS = 2, 3, 12, 1e-5


@jax.jit
def mix(prefix, bank, proj, norm):
    """The sums to save are given as a list; there is room for six. The query is the second of three."""
    return mix_residuals(prefix, saved_bank(prefix, bank, proj, norm), jnp.asarray(1), EPS)


def saved_bank(prefix, sums, proj, norm, traced=True):
    query = mix_query(jnp.asarray(norm), jnp.asarray(proj)[None])
    bank = empty_bank(6, prefix, jnp.stack([2 * query, query, -query]))
    bank = bank._replace(held=jnp.asarray(0)) if traced else bank
    for entry in sums:
        bank = save_block(bank, jnp.asarray(entry), jnp.asarray(True) if traced else True, EPS)
    return bank


@pytest.fixture(scope="module")
def arguments():
    """Five sources from large to so small that eps decides, `proj` and `norm`."""
    rng = np.random.default_rng(0)
    scale = np.array([1, 30, 1e-1, 3e-3, 2]).reshape(5, 1, 1, 1)
    sources = (rng.normal(size=(5, B, T, D)) * scale).astype(np.float32)
    return sources, *(rng.normal(size=(2, D)).astype(np.float32))


def loop(sources, proj, norm):
    sources, proj, norm = (np.asarray(x, np.float64) for x in (sources, proj, norm))
    mixed = np.empty(sources.shape[1:])
    for at in np.ndindex(B, T):
        entries = [source[at] for source in sources]
        scores = [sum(v / np.sqrt(sum(v * v) / D + EPS) * norm * proj) for v in entries]
        shares = np.exp(np.array(scores) - max(scores))
        mixed[at] = sum(share * v for share, v in zip(shares / sum(shares), entries, strict=True))
    return mixed


@pytest.mark.parametrize("count", [1, 2, 5])
def test_equals_the_loop(arguments, count):
    """The entries themselves are mixed, the normalised ones weigh."""
    sources, proj, norm = arguments
    *bank, prefix = sources[:count]
    found = mix(prefix, bank, proj, norm)
    np.testing.assert_allclose(found, loop(sources[:count], proj, norm), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_source_comes_out_as_it_is(arguments, dtype):
    sources, proj, norm = arguments
    prefix = jnp.asarray(sources[1], dtype)
    found = mix(prefix, [], proj, norm)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, prefix)


@pytest.mark.parametrize("scaled", range(3))
def test_a_source_a_thousand_times_larger_weighs_the_same(arguments, scaled):
    """Each source has numbers of its own four channels only, so that its share can be read off the mix."""
    _, proj, norm = arguments
    own = np.arange(D) // 4 == np.arange(3)[:, None]
    sources = (np.random.default_rng(0).uniform(1, 2, (3, B, T, D)) * own[:, None, None]).astype(np.float32)

    def shares(sources):
        *bank, prefix = sources
        return np.asarray(mix(prefix, bank, proj, norm)) / sources.sum(axis=0)

    larger = sources.copy()
    larger[scaled] *= 1000
    np.testing.assert_allclose(shares(larger), shares(sources), rtol=1e-4)


def test_bfloat16_scores_and_sums_are_float32(arguments):
    sources, proj, norm = (jnp.asarray(x, jnp.bfloat16) for x in arguments)
    *bank, prefix = sources
    found = mix(prefix, bank, proj, norm)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), loop(sources, proj, norm), rtol=2.0**-8, atol=1e-5)


def test_a_number_known_while_tracing_gives_the_same(arguments):
    sources, proj, norm = arguments
    sources, proj, norm = map(jnp.asarray, (sources, proj, norm))
    *bank, prefix = sources[:3]
    saved = saved_bank(prefix, bank, proj, norm, traced=False)
    saved = saved._replace(sums=saved.sums.at[2:].set(jnp.nan))  # what is not held is not looked at
    np.testing.assert_allclose(
        mix_residuals(prefix, saved, 1, EPS), mix(prefix, bank, proj, norm), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("traced", [True, False])
def test_a_running_sum_just_saved_counts_once(arguments, traced):
    """A layer that starts a block saves the running sum before it mixes."""
    sources, proj, norm = arguments
    bank = saved_bank(jnp.asarray(sources[2]), list(sources[:3]), proj, norm, traced)
    found = mix_residuals(jnp.asarray(sources[2]), bank, 1, EPS, fresh=jnp.asarray(True) if traced else True)
    np.testing.assert_allclose(found, loop(sources[:3], proj, norm), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("traced", [True, False])
def test_a_block_is_saved_only_where_one_starts(arguments, starts, traced):
    sources, proj, norm = arguments
    bank = saved_bank(jnp.asarray(sources[0]), list(sources[:1]), proj, norm, traced)
    saved = save_block(bank, jnp.asarray(sources[4]), jnp.asarray(starts) if traced else starts, EPS)
    assert int(saved.held) == (2 if starts else 1)
    np.testing.assert_array_equal(saved.sums[0], sources[0])
    np.testing.assert_array_equal(saved.sums[1], sources[4] if starts else 0)
    np.testing.assert_array_equal(saved.sums[2:], 0)
    assert np.isfinite(saved.scores[:, :2]).all() == starts
    assert np.isneginf(saved.scores[:, 2:]).all()


def test_a_full_bank_stays_as_it_is(arguments):
    """In a loop every round may start a block; in the last rounds the bank is full."""
    sources, proj, norm = arguments
    bank = saved_bank(jnp.asarray(sources[0]), [sources[i % 5] for i in range(6)], proj, norm)
    saved = save_block(bank, jnp.zeros((B, T, D)), jnp.asarray(False), EPS)
    assert int(saved.held) == 6
    np.testing.assert_array_equal(saved.sums, bank.sums)
    np.testing.assert_array_equal(saved.scores, bank.scores)
