"""Where a training state lies: as the table says for adapters, and an optimizer's arrays as what they belong to."""

import dataclasses

import jax
import pytest
from conftest import load_tiny
from jax.sharding import PartitionSpec

from kimi_jax.finetune import LoRAConfig, OptimizerConfig, adapter_spec, make_optimizer
from kimi_jax.finetune.step import state_layout

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"name": "muon"}])
def test_adapters_and_means_lie_as_the_weights(options):
    model = load_tiny("tiny-k3", "data2-tensor2")
    lora = LoRAConfig(rank=2, targets=("q_proj", "o_proj", "experts"))
    spec = dataclasses.replace(model.spec, adapters=adapter_spec(model.config, lora))
    state = state_layout(spec, make_optimizer(OptimizerConfig(**options), 10))
    layer = state.adapters["layers"]["1"]
    assert layer["self_attn"]["q_proj"]["lora_A"].sharding.spec == PartitionSpec(None, None)
    assert layer["self_attn"]["q_proj"]["lora_B"].sharding.spec == PartitionSpec("tensor", None)
    assert layer["self_attn"]["o_proj"]["lora_A"].sharding.spec == PartitionSpec(None, "tensor")
    experts = PartitionSpec(("data", "tensor"), None, None)
    assert layer["block_sparse_moe"]["experts"]["w1"]["lora_A"].sharding.spec == experts
    own = dict(jax.tree.leaves_with_path(state.adapters))
    kept = 0
    for path, leaf in jax.tree.leaves_with_path(state.optimizer):
        tail = next((path[at:] for at in range(len(path)) if path[at:] in own), None)
        if tail is None:
            assert leaf.sharding.spec == PartitionSpec()
        else:
            assert leaf.sharding == own[tail].sharding
            kept += 1
    assert kept >= len(own)
