import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.attn_res import Bank, mix_residuals, save_block

B, T, D, EPS = 2, 3, 12, 1e-5


@jax.jit
def mix(prefix, bank, proj, norm):
    """The bank is given as a list, and padded to six sums of which so many are held."""
    sums = jnp.zeros((6, *prefix.shape), prefix.dtype)
    bank = Bank(sums.at[: len(bank)].set(jnp.stack(bank)) if bank else sums, jnp.asarray(len(bank)))
    return mix_residuals(prefix, bank, proj, norm, EPS)


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
    known = mix_residuals(prefix, Bank(sources, 2), proj, norm, EPS)  # what is not held is no zero here
    np.testing.assert_allclose(known, mix(prefix, bank, proj, norm), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("traced", [True, False])
def test_a_block_is_saved_only_where_one_starts(arguments, starts, traced):
    sources, _, _ = arguments
    bank = Bank(jnp.asarray(sources[:3]).at[1:].set(0), jnp.asarray(1) if traced else 1)
    saved = save_block(bank, jnp.asarray(sources[4]), jnp.asarray(starts) if traced else starts)
    assert int(saved.held) == (2 if starts else 1)
    wanted = np.zeros_like(sources[:3])
    wanted[0] = sources[0]
    wanted[1] = sources[4] if starts else 0
    np.testing.assert_array_equal(saved.sums, wanted)


def test_a_full_bank_stays_as_it_is(arguments):
    """In a loop every round may start a block; in the last rounds the bank is full."""
    sources, _, _ = arguments
    bank = Bank(jnp.asarray(sources), jnp.asarray(5))
    saved = save_block(bank, jnp.zeros((B, T, D)), jnp.asarray(False))
    assert int(saved.held) == 5
    np.testing.assert_array_equal(saved.sums, sources)
