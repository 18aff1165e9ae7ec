"""Training with layers in a loop, as accelerators run it: the gradients are those of each layer for itself."""

import json
from functools import partial

import jax
import numpy as np
from finetune.batches import random_adapters, random_batch

import kimi_jax as kj
from kimi_jax.checkpoint.synthesize import synthesize
from kimi_jax.cli.bundled import BUNDLED
from kimi_jax.finetune.step import batch_loss
from kimi_jax.model.adapters import fetch_adapters, split_params


@partial(jax.jit, static_argnums=0)
def loss_and_gradients(spec, base, adapters, batch):
    return jax.value_and_grad(lambda x: batch_loss(spec, base, x, batch)[0])(adapters)


def test_a_loop_has_the_gradients_of_its_layers(tmp_path):
    """Three KDA layers, the last two as two rounds, one of which starts a block of Attention Residuals."""
    raw = json.loads((BUNDLED / "config.json").read_text())
    text = raw["text_config"]
    text |= {"num_hidden_layers": 3, "attn_res_block_size": 2}
    text["linear_attn_config"] |= {"kda_layers": [1, 2, 3], "full_attn_layers": []}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    synthesize(tmp_path / "config.json", tmp_path / "model")
    found = []
    for loop in (False, True):
        model = random_adapters(kj.load_model(tmp_path / "model", dtype="float32", loop=loop))
        base, adapters = split_params(model.params)
        loss, gradients = loss_and_gradients(model.spec, base, adapters, random_batch(model.config))
        found.append((loss, fetch_adapters(model.spec, gradients)))
    assert model.spec.layer_keys == ("0", "1:3:1")
    (loss, wanted), (looped, gradients) = found
    np.testing.assert_allclose(looped, loss, rtol=1e-6)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        largest = np.abs(gradient).max()
        assert largest > 0, name
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-4 * largest, err_msg=name)
