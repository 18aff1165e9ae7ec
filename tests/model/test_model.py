"""The loaded model: one set of arrays, seen as nested dicts and as modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kimi_jax as kj
from kimi_jax.parallel.mesh import MeshError

pytestmark = pytest.mark.xdist_group("functions")
TOKENS = [[5, 17, 130, 44], [7, 0, 0, 0], [30, 31, 32, 0], [2, 2, 2, 0]]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("tiny-k31")


def test_module_tree_reads_the_same_arrays(model):
    weight = model.layers[2].self_attn.kv_a_proj_with_mqa.weight
    assert weight[...] is model.params["layers"]["2"]["self_attn"]["kv_a_proj_with_mqa"]["weight"]
    assert model.module.lm_head.weight[...] is model.params["lm_head"]["weight"]
    assert model.params["layers"]["3"]["block_sparse_moe"]["experts"]["w1"]["weight_packed"].shape == (8, 64, 32)


def test_looped_layers_are_stacks_of_the_same_arrays(model, tiny):
    looped = tiny("tiny-k31", loop=True)
    assert list(looped.params["layers"]) == ["0", "1:5:2", "2:5:2", "5"]
    assert looped.identity == model.identity
    assert len(looped.layers) == 6
    for i, layer in enumerate(looped.layers):
        found, wanted = (jax.tree.leaves(nnx.state(x)) for x in (layer, model.layers[i]))
        assert all(np.array_equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert looped.layers[-1].self_attn.has_indexer
    assert not hasattr(looped.layers[1].self_attn, "has_indexer")


def test_a_loop_over_chosen_layers_is_refused(tiny):
    with pytest.raises(ValueError, match="loop is for whole models"):
        kj.load_model(tiny.directory("tiny-k31"), layers=[1], loop=True)


def test_replaced_parameters_are_used(model):
    head = {"weight": jnp.zeros_like(model.params["lm_head"]["weight"])}
    edited = model.replace(params={**model.params, "lm_head": head})
    assert not np.any(kj.forward(edited, TOKENS, [4, 1, 3, 3]))
    assert np.any(kj.forward(model, TOKENS, [4, 1, 3, 3]))


def test_identity_sees_one_changed_number_anywhere(model, tiny):
    assert model.replace(params=dict(model.params)).identity == model.identity
    assert tiny("tiny-k31", "data2-tensor2").identity == model.identity
    assert tiny("tiny-k3").identity != model.identity
    packed = model.params["layers"]["3"]["block_sparse_moe"]["experts"]["w2"]["weight_packed"]
    flipped = packed.at[7, 33, 5].set(packed[7, 33, 5] ^ np.uint8(1))
    changed = jax.tree.map(lambda x: flipped if x is packed else x, model.params)
    assert model.replace(params=changed).identity != model.identity


def test_replacing_by_other_names_or_shapes_names_the_parameter(model):
    rest = {name: value for name, value in model.params.items() if name != "norm"}
    with pytest.raises(ValueError, match=r"parameter norm\.weight has the shape None, the model wants \(96,\)"):
        model.replace(params=rest)
    with pytest.raises(ValueError, match=r"parameter norm\.bias has the shape \(96,\), the model wants None"):
        model.replace(params={**rest, "norm": {**model.params["norm"], "bias": jnp.zeros(96)}})
    with pytest.raises(ValueError, match=r"parameter norm\.weight has the shape \(95,\), the model wants \(96,\)"):
        model.replace(params={**rest, "norm": {"weight": jnp.zeros(95)}})


def test_a_model_and_a_cache_print_as_one_line(model, tiny):
    assert repr(model) == "Model(KimiK31ForConditionalGeneration, 6 layers, float32, on one device)"
    assert "{'data': 2, 'context': 1, 'tensor': 2}" in repr(tiny("tiny-k31", "data2-tensor2"))
    assert repr(kj.init_cache(model, 2, 8)) == "Cache(2 rows of at most 8 tokens)"


def test_a_mesh_that_make_mesh_did_not_make_is_refused(tiny):
    other = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("rows",))
    with pytest.raises(MeshError, match="a mesh with the axes data, context, tensor is wanted"):
        kj.load_model(tiny.directory("tiny-k31"), mesh=other)
