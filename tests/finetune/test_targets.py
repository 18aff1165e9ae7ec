"""Which modules a target means, in each of the three architectures."""

import pytest
from conftest import load_tiny

from kimi_jax.config import ModelConfig
from kimi_jax.finetune.targets import LoRAConfig, adapter_spec


def chosen(name, *targets, **options):
    config = load_tiny(name).config
    return [module for module, *_ in adapter_spec(config, LoRAConfig(targets=targets, **options)).modules]


def test_attention_of_k3():
    found = chosen("tiny-k3", "attention")
    kda = {"q_proj", "k_proj", "v_proj", "o_proj", "b_proj", "f_a_proj", "f_b_proj", "g_proj"}
    mla = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj"}
    assert {name.rpartition(".")[2] for name in found if name.startswith("layers.0.")} == kda
    assert {name.rpartition(".")[2] for name in found if name.startswith("layers.3.")} == mla
    assert all(".self_attn." in name for name in found)


def test_the_indexer_of_k31_is_left_alone():
    assert not [name for name in chosen("tiny-k31", "attention") if "indexer" in name]
    with pytest.raises(ValueError, match="'wq_b' fits no module"):
        chosen("tiny-k31", "wq_b")


def test_experts_latent_dense_and_head():
    assert chosen("tiny-k3", "experts")[:3] == [f"layers.1.block_sparse_moe.experts.w{i}" for i in (1, 2, 3)]
    ends = {name.rpartition(".")[2] for name in chosen("tiny-k3", "latent")}
    assert ends == {"routed_expert_down_proj", "routed_expert_up_proj"}
    assert chosen("tiny-k3", "mlp") == [f"layers.0.mlp.{part}_proj" for part in ("down", "gate", "up")]
    assert chosen("tiny-k3", "head") == ["lm_head"]


def test_names_and_patterns():
    assert chosen("tiny-k3", "layers.[01].*.q_proj") == ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"]
    assert "layers.3.self_attn.o_proj" in chosen("tiny-k3", "self_attn.o_proj")
    for wrong in ("gate", "self_attention_res_proj", "embed_tokens", "q_poj"):
        with pytest.raises(ValueError, match=f"'{wrong}' fits no module.*groups are attention"):
            chosen("tiny-k3", wrong)


def test_scale():
    spec = adapter_spec(ModelConfig.from_file("kimi-k3"), LoRAConfig(rank=8, alpha=32.0, targets=("q_b_proj",)))
    assert len(spec.modules) == 24
    assert {(rank, scale) for _, rank, scale in spec.modules} == {(8, 4.0)}
