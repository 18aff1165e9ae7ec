"""Loading with most of the weights that are not experts rounded to eight bits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import kimi_jax as kj
from kimi_jax.checkpoint.load import declared_model
from kimi_jax.model.model import flatten
from kimi_jax.ops.rounding import ROUNDED

KEPT = re.compile(
    r"embed_tokens|kv_b_proj|\.indexer\.|\.gate\.|routed_expert_|_res_proj|norm|_conv1d|\.experts\.|A_log|dt_bias"
)


@pytest.fixture(scope="module")
def rounded(tiny):
    """`rounded(kind, name="tiny-kimi-linear", mesh=None, loop=False)`: a tiny model, each loaded once."""
    models = {}

    def load(kind, name="tiny-kimi-linear", mesh=None, loop=False):
        key = kind, name, str(mesh), loop
        if key not in models:
            models[key] = kj.load_model(
                tiny.directory(name), mesh=kj.make_mesh(mesh), dtype="float32", loop=loop, dense_weights=kind
            )
        return models[key]

    return load


@pytest.mark.parametrize(("name", "kind"), [("tiny-k31", "int8"), ("tiny-kimi-linear", "fp8")])
def test_what_is_rounded_and_what_is_kept(rounded, tiny, name, kind):
    found, before = (dict(flatten(model.params)) for model in (rounded(kind, name), tiny(name)))
    for key, array in before.items():
        if KEPT.search(key):
            np.testing.assert_array_equal(np.asarray(found.pop(key)), np.asarray(array), strict=True, err_msg=key)
            continue
        weight, scale = np.asarray(found.pop(key)), np.asarray(found.pop(f"{key}_scale"))
        wanted = np.asarray(array, np.float64)
        assert (weight.dtype, scale.dtype) == (ROUNDED[kind][0], np.float32)
        np.testing.assert_allclose(scale, np.abs(wanted).max(-1) / ROUNDED[kind][1], rtol=2.5e-7, err_msg=key)
        # Half a step: of int8 of the scale; of float8_e4m3fn of the number's binary digit, or of 2⁻⁹.
        step = 1 / 2 if kind == "int8" else np.maximum(np.abs(wanted) / scale[:, None] / 16, 2.0**-10)
        error = np.abs(weight.astype(np.float64) * scale[:, None] - wanted)
        assert np.all(error <= 1.001 * step * scale[:, None]), key
        assert np.any(error)
    assert not found


def test_meshes_and_loops_hold_the_same_numbers(rounded, tiny):
    """A channel whose inputs lie on several devices (`o_proj`, `down_proj`) has one scale."""
    model = rounded("fp8")
    split = rounded("fp8", mesh={"tensor": 2})
    attention = split.params["layers"]["0"]["self_attn"]
    assert attention["o_proj"]["weight"].sharding.spec == PartitionSpec(None, "tensor")
    assert attention["o_proj"]["weight_scale"].sharding.is_fully_replicated
    assert attention["q_proj"]["weight_scale"].sharding.spec == PartitionSpec("tensor")
    looped = rounded("fp8", loop=True)
    stack = next(key for key in looped.params["layers"] if ":" in key)
    assert looped.params["layers"][stack]["self_attn"]["o_proj"]["weight_scale"].shape == (2, 128)
    layer = int(stack.split(":")[0])
    for mine, other in ((split.params, model.params), [nnx.state(x.layers[layer]) for x in (looped, model)]):
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)
    assert looped.identity == model.identity
    assert model.identity != tiny("tiny-kimi-linear").identity


def test_as_stored_is_the_default(tiny):
    model = kj.load_model(tiny.directory("tiny-kimi-linear"), dtype="float32", dense_weights="bf16")
    assert model.spec == tiny("tiny-kimi-linear").spec
    assert jax.tree.map(jnp.shape, model.params) == jax.tree.map(jnp.shape, tiny("tiny-kimi-linear").params)


@pytest.mark.parametrize("loop", [False, True])
def test_what_is_declared_is_what_is_loaded(rounded, tiny, loop):
    directory = tiny.directory("tiny-kimi-linear")
    spec, declared = declared_model(directory, dtype="float32", loop=loop, dense_weights="fp8")
    model = rounded("fp8", loop=loop)
    assert spec == model.spec
    found, wanted = (dict(flatten(params)) for params in (declared, model.params))
    assert {key: (x.shape, x.dtype) for key, x in found.items()} == {k: (x.shape, x.dtype) for k, x in wanted.items()}


def test_some_layers(rounded, tiny):
    some = kj.load_model(tiny.directory("tiny-kimi-linear"), dtype="float32", layers=[2], dense_weights="fp8")
    own, of_all = (model.layers[2].self_attn.o_proj.weight_scale[...] for model in (some, rounded("fp8")))
    np.testing.assert_array_equal(own, of_all)
    absent = some.params["layers"]["1"]["self_attn"]["o_proj"]
    assert absent["weight"] == jax.ShapeDtypeStruct((128, 64), jnp.float8_e4m3fn)
    assert absent["weight_scale"] == jax.ShapeDtypeStruct((128,), jnp.float32)


def test_an_embedding_that_is_the_head_is_kept(edited):
    def tie(raw):
        raw.get("text_config", raw)["tie_word_embeddings"] = True

    def drop_head(tensors):
        del tensors["lm_head.weight"]

    directory = edited("tiny-kimi-linear", drop_head, tie)
    _, declared = declared_model(directory, dtype="float32", dense_weights="int8")
    assert "lm_head" not in declared
    assert {key: x.dtype for key, x in declared["embed_tokens"].items()} == {"weight": jnp.bfloat16}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_cannot_be_rounded(edited, bad):
    name = "model.layers.2.self_attn.o_proj.weight"

    def spoil(tensors):
        array = tensors[name].array.copy()
        array[[3, 5], 7] = bad
        tensors[name] = tensors[name].of(array)

    directory = edited("tiny-kimi-linear", spoil)
    words = r"parameter layers\.2\.self_attn\.o_proj\.weight: NaN or infinity in 2 of its \d+ output channels.*'bf16'"
    mesh = kj.make_mesh({"tensor": 2})
    with pytest.raises(ValueError, match=words):
        kj.load_model(directory, mesh=mesh, layers=[2], dense_weights="int8")


@pytest.mark.parametrize("wrong", ["int4", "bfloat16"])
def test_another_kind_is_refused(tiny, refused, wrong):
    words = f"dense_weights '{wrong}' is none of bf16, int8, fp8"
    refused(tiny.directory("tiny-k3"), words, error=ValueError, dense_weights=wrong)
