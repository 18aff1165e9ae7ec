"""Several documents a row: what each token gets, and every gradient, is as if its document stood alone.

Models of two layers cut out of the tiny checkpoints.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from two_layers import two_layers

from kimi_jax.model.call import make_call
from kimi_jax.model.model import computing

ROWS, WIDTH = 6, 96
DOCUMENTS = ((1, 3, 65, 20), (17, 66))  # tokens of each document of the first two rows; the other rows are empty
TRAINED = (("0", "k_proj"), ("0", "f_b_proj"), ("1", "kv_a_proj_with_mqa"))


def rows_of_documents():
    """Tokens, lengths and `first`; padding has a `first` that must not matter."""
    tokens, first = np.zeros((ROWS, WIDTH), np.int32), np.full((ROWS, WIDTH), WIDTH, np.int32)
    lengths = np.zeros(ROWS, np.int32)
    rng = np.random.default_rng(0)
    for row, sizes in enumerate(DOCUMENTS):
        for size in sizes:
            at = slice(lengths[row], lengths[row] + size)
            tokens[row, at], first[row, at] = rng.integers(0, 500, size), at.start
            lengths[row] += size
    return tokens, lengths, first


def one_document_a_row(tokens):
    """The same documents, each in a row of its own."""
    alone, lengths = np.zeros_like(tokens), np.array([size for sizes in DOCUMENTS for size in sizes], np.int32)
    parts = [part for row, sizes in enumerate(DOCUMENTS) for part in np.split(tokens[row], np.cumsum(sizes))[:-1]]
    for row, part in zip(alone, parts, strict=True):
        row[: len(part)] = part
    return alone, lengths, np.zeros_like(tokens)


def gather_tokens(x, lengths):
    """The real tokens' entries of `[B, T, …]`, document after document."""
    return np.concatenate([np.asarray(x)[row, :length] for row, length in enumerate(lengths)])


def compiled(model):
    """`f(tokens, lengths, first)` -> gradients of a summed loss for `TRAINED`, (logits, chosen experts)."""

    def loss(trained, params, tokens, lengths, first):
        layers = params["layers"]
        for (layer, name), weight in trained.items():
            own = layers[layer]
            layers = layers | {layer: own | {"self_attn": own["self_attn"] | {name: {"weight": weight}}}}
        with computing(model.spec):
            module = model.spec.module({**params, "layers": layers})
            out = module(tokens, lengths, observe=lambda trace: trace.router_index, first=first)
            logits = module.logits(out.final_hidden)
        own = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
        real = jnp.arange(WIDTH)[None, :] < lengths[:, None]
        return jnp.sum(jnp.where(real, own, 0)), (logits, out.observed[1])

    trained = {
        (layer, name): model.params["layers"][layer]["self_attn"][name]["weight"].astype(jnp.float32)
        for layer, name in TRAINED
    }
    function = jax.jit(jax.grad(loss, has_aux=True))
    return lambda *rows: function(trained, model.params, *map(jnp.asarray, rows))


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-k31"])
def test_a_document_in_a_row_is_as_alone(name, tiny):
    packed = rows_of_documents()
    alone = one_document_a_row(packed[0])
    run = compiled(two_layers(tiny(name)))
    (found, (logits, index)), (wanted, (wanted_logits, wanted_index)) = run(*packed), run(*alone)
    logits, wanted_logits = gather_tokens(logits, packed[1]), gather_tokens(wanted_logits, alone[1])
    np.testing.assert_allclose(logits, wanted_logits, rtol=0, atol=1e-4)
    index, wanted_index = gather_tokens(index, packed[1]), gather_tokens(wanted_index, alone[1])
    np.testing.assert_array_equal(np.sort(index), np.sort(wanted_index))
    for which, gradient in wanted.items():
        assert np.abs(gradient).max() > 1e-3, which
        np.testing.assert_allclose(found[which], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max(), err_msg=which)


def test_documents_and_a_cache_are_refused():
    rows = jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(ValueError, match="several documents a row are for calls without a cache"):
        make_call(4, jnp.array([4, 4]), jnp.array([0, 0]), rows)
