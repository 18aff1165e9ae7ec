from dataclasses import replace

import pytest

from kimi_jax.config import ModelConfig, find_config
from kimi_jax.model.model import abstract_params, param_layout
from kimi_jax.model.segments import Segment, segments


def config(kinds, dense=1):
    base = ModelConfig.from_file(find_config("tiny-k3"))
    return replace(base, layer_kinds=tuple(kinds), moe=replace(base.moe, first_layer=dense), attn_res_block_size=None)


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-k3.1-pro"])
def test_93_layers_are_compiled_as_9(name):
    parts = segments(ModelConfig.from_file(find_config(name)), True)
    assert sum(part.period for part in parts) == 9
    assert [part for part in parts if part.rounds > 1] == [Segment(1, 4, 22)]
    covered = sorted(layer for part in parts for place in range(part.period) for layer in part.layers(place))
    assert covered == list(range(93))


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        (["kda"] * 2, None),  # the first is dense
        (["kda"] * 3, Segment(1, 1, 2)),
        (["kda", "mla"] * 3, Segment(1, 2, 2)),
        (["kda", "kda", "mla", "kda", "kda", "mla", "kda", "mla"], Segment(1, 3, 2)),
        (["mla", "kda", "kda", "kda", "mla", "mla"], Segment(1, 1, 3)),
    ],
)
def test_the_repetition_that_leaves_fewest(kinds, wanted):
    found = [part for part in segments(config(kinds), True) if part.rounds > 1]
    assert found == ([] if wanted is None else [wanted])


def test_stacks_hold_every_parameter_once():
    model = ModelConfig.from_file(find_config("kimi-k3"))
    layout, declared = param_layout(model, True, "bf16", None), abstract_params(model)
    assert sorted(name for _, _, names in layout.values() for name in names) == sorted(declared)
    for key, (struct, axes, names) in layout.items():
        for name in names:
            inner, inner_axes = declared[name]
            lead = () if len(names) == 1 else (len(names),)
            assert (struct.shape, struct.dtype) == ((*lead, *inner.shape), inner.dtype), key
            assert axes == (*(None for _ in lead), *inner_axes)
    packed = layout["layers.4:89:4.block_sparse_moe.experts.w1.weight_packed"]
    assert packed[0].shape == (22, 896, 3072, 1792)
    assert packed[2][1] == "layers.8.block_sparse_moe.experts.w1.weight_packed"
