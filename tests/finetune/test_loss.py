"""The loss in pieces against all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, load_tiny

import kimi_jax as kj
from kimi_jax.finetune import loss
from kimi_jax.model.model import computing
from kimi_jax.parallel.sharding import on_mesh


@pytest.mark.parametrize("piece", [1, 3, 7])
def test_pieces_of_the_sequence(piece, monkeypatch):
    """Seven tokens a row, also where a piece does not divide them; the gradient of what the head reads too."""
    model, rng = load_tiny("tiny-k31"), np.random.default_rng(0)
    vocab, width = model.config.vocab_size, model.config.hidden_size
    hidden = rng.normal(size=(2, 7, width)).astype(np.float32)
    targets = rng.integers(0, vocab, (2, 7)).astype(np.int32)
    weights = rng.integers(0, 2, (2, 7)).astype(np.float32)
    monkeypatch.setattr(loss, "PIECE_LOGITS", 2 * vocab * piece)
    assert loss.loss_piece(2, 7, vocab) == piece
    with computing(model.spec):
        module = model.spec.module(model.params)

        def whole(h):
            chances = jax.nn.log_softmax(module.logits(h), axis=-1)
            return -jnp.sum(weights * jnp.take_along_axis(chances, targets[..., None], axis=-1)[..., 0])

        wanted, slope = jax.value_and_grad(whole)(hidden)
        found, gradient = jax.value_and_grad(loss.next_token_loss, argnums=1)(module, hidden, targets, weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)


def test_a_piece_is_counted_on_each_device():
    """16 Mi logits a device of a vocabulary of 163,840: rows lie over data, the vocabulary over tensor."""
    assert loss.loss_piece(1, 8192, 163_840) == 102
    assert loss.loss_piece(8, 8192, 163_840) == 12
    with on_mesh(kj.make_mesh(MESHES["data8"])):
        assert loss.loss_piece(8, 8192, 163_840) == 102
    with on_mesh(kj.make_mesh(MESHES["all2"])):
        assert loss.loss_piece(8, 8192, 163_840) == 51
    assert loss.loss_piece(1024, 8192, 163_840) == 1
