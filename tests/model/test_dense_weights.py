"""What dense weights in eight bits cost in exactness; `tests/bench/dense_weights.py` prints it for every tiny model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kimi_jax as kj
from kimi_jax.model.call import make_call
from kimi_jax.model.layers import Linear
from kimi_jax.model.model import computing
from kimi_jax.ops.rounding import ROUNDED

ERRORS = {
    "int8": {"kda": 0.018, "mla": 0.013, "mlp": 0.0116, "moe": 0.0087, "head": 0.0064},
    "fp8": {"kda": 0.070, "mla": 0.061, "mlp": 0.046, "moe": 0.035, "head": 0.0257},
}
"""Relative RMS of a sublayer's output, tiny-k3."""


def relative_rms(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))


@pytest.mark.parametrize("kind", ERRORS)
def test_error_of_a_sublayer(kind, tiny, golden):
    """Layers 0 (KDA, dense MLP), 1 (mixture of experts, of which the shared ones are rounded), 3 (MLA) and the head."""
    data = golden("tiny-k3")
    model = kj.load_model(tiny.directory("tiny-k3"), dtype="float32", layers=[0, 1, 3], dense_weights=kind)
    chosen = jnp.asarray(data["router_topk_index"][None, 0])
    assert data["router_layers"][0] == 1

    @jax.jit
    def run(attn_in, mlp_in, final):
        with computing(model.spec):
            call = make_call(attn_in.shape[2], jnp.asarray([attn_in.shape[2]]), None)
            layers = model.module.layers
            return {
                "kda": layers[0].self_attn(attn_in[0], call, None)[0],
                "mla": layers[3].self_attn(attn_in[3], call, None)[0],
                "mlp": layers[0].mlp(mlp_in[0]),
                "moe": layers[1].block_sparse_moe(mlp_in[1], call, chosen)[0],
                "head": model.module.logits(final),
            }

    attn_out, mlp_out = data["seq_attn_out"], data["seq_mlp_out"]
    wanted = {"kda": attn_out[0], "mla": attn_out[3], "mlp": mlp_out[0], "moe": mlp_out[1], "head": data["seq_logits"]}
    found = run(*(jnp.asarray(data[f"seq_{name}"][..., None, :, :]) for name in ("attn_in", "mlp_in", "final_norm_in")))
    errors = {name: relative_rms(found[name][0], wanted[name]) for name in wanted}
    assert errors == pytest.approx(ERRORS[kind], rel=0.1)


def test_logits_on_a_mesh_and_in_a_loop(tiny, golden):
    """With the golden choice of experts: random routers choose others for the least cause.

    The error is that of one device without a loop (`tests/bench/dense_weights.py`): the numbers are the same.
    """
    data = golden("tiny-kimi-linear")
    choice = {int(layer): data["router_topk_index"][n][None] for n, layer in enumerate(data["router_layers"])}
    directory, mesh = tiny.directory("tiny-kimi-linear"), kj.make_mesh({"tensor": 2})
    model = kj.load_model(directory, mesh=mesh, dtype="float32", loop=True, dense_weights="int8")

    @jax.jit
    def run(params, tokens, choice):
        with computing(model.spec):
            module = model.spec.module(params)
            return module.logits(module(tokens, jnp.asarray([tokens.shape[1]]), choice=choice).final_hidden)

    logits = run(model.params, data["seq_input_ids"][None], choice)[0]
    assert relative_rms(logits, data["seq_logits"]) == pytest.approx(0.0603, rel=0.002)


@pytest.mark.parametrize("kind", ERRORS)
def test_scales_multiply_a_product_of_the_numbers_as_they_are(kind):
    """In bfloat16: the rounded numbers are exact in it, and a scale keeps its 24 bits."""
    linear = Linear(3, 4, stored=kind)
    weight = np.array([[1, -2, 3, 104], [0, 0, 0, 0], [96, 0, 0, 104]], np.float32)
    scale = np.array([1 + 2**-12, 1, 2**-20], np.float32)
    linear.weight = nnx.Param(jnp.asarray(weight).astype(ROUNDED[kind][0]))
    linear.weight_scale = nnx.Param(jnp.asarray(scale))
    x = np.array([[1, 2, 0.5, 1], [0, 0, 0, -3]], np.float32)
    found = linear(jnp.asarray(x, jnp.bfloat16), jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(found, x @ weight.T * scale)
    assert linear(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16
