"""The latent cache in float8_e4m3fn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from two_layers import two_layers

import kimi_jax as kj
from kimi_jax.inference.caches import CacheError
from kimi_jax.model.cache import FP8, write_rows
from kimi_jax.model.call import make_call
from kimi_jax.model.model import computing


def relative_rms(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-k31"])
def test_error_of_a_sublayer(tiny, name):
    """Attention to 39 entries and to one more, all of them or those that an indexer chooses.

    Rounding to four binary digits costs about 2.5 % of each entry.
    """
    model = tiny(name)
    number = next(i for i in model.config.mla_layers if model.config.has_indexer(i) == (name == "tiny-k31"))
    attention = model.layers[number].self_attn
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 40, model.config.hidden_size)), jnp.float32)

    @jax.jit
    def attend(x, before, cache):
        with computing(model.spec):
            return attention(x, make_call(x.shape[1], jnp.array([x.shape[1]]), before), cache)

    outputs = {}
    for kind in (None, "fp8"):
        cache = kj.init_cache(model, 1, 64, latent_dtype=kind).layers[number]
        prompt, cache = attend(x[:, :39], jnp.array([0]), cache)
        token, cache = attend(x[:, 39:], jnp.array([39]), cache)
        assert cache.latents.dtype == (FP8 if kind else jnp.float32)
        outputs[kind] = prompt, token
    for found, wanted in zip(outputs["fp8"], outputs[None], strict=True):
        error = relative_rms(found, wanted)
        assert 0.002 < error < 0.08


def test_saved_and_loaded(tiny, tmp_path):
    model = two_layers(tiny("tiny-k3"))
    cache = kj.init_cache(model, 1, 64, latent_dtype="fp8")
    _, cache = kj.decode(model, [7], cache)
    assert cache.latent_dtype == FP8
    kj.save_cache(tmp_path / "cache.safetensors", cache)
    again = kj.load_cache(tmp_path / "cache.safetensors", model)
    assert again.latent_dtype == FP8
    (once, _), (twice, _) = (kj.decode(model, [9], state) for state in (again, cache))
    np.testing.assert_array_equal(once, twice)


def test_what_is_too_large_becomes_the_largest_number():
    buffer = jnp.zeros((1, 4, 2), FP8)
    new = jnp.array([[[1e6, -1e6], [1.0, 1.0625]]])
    written = write_rows(buffer, new, jnp.array([[1, 2]]), jnp.ones((1, 2), bool))
    np.testing.assert_array_equal(np.asarray(written, np.float32)[0], [[0, 0], [448, -448], [1, 1], [0, 0]])


def test_other_dtypes_are_refused(tiny):
    model = tiny("tiny-k3")
    with pytest.raises(ValueError, match="latent_dtype bfloat16 is neither fp8 nor the compute dtype float32"):
        kj.init_cache(model, 1, 64, latent_dtype="bfloat16")
    other = tiny("tiny-k3", dtype="bfloat16")
    cache = kj.init_cache(other, 1, 64, latent_dtype="fp8")
    with pytest.raises(CacheError, match="another model or dtype"):
        kj.decode(model, [1], cache)
