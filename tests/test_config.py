"""Reading config.json: what the shipped files say, what is accepted, and what is refused with which words."""

import json
from copy import deepcopy
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

import kimi_jax as kj
from kimi_jax.config import ConfigError, shipped_configs, shipped_directory

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT.parent / "shared" / "k3" / "config.json"
SHIPPED = ("kimi-k3", "kimi-k3.1-pro", "kimi-linear-48b", "tiny-k3")
K3_MLA = (*range(3, 92, 4), 92)

# K3 and K3.1 Pro share a column: what differs stands below the table.
FACTS = [
    ("hidden_size", 7168, 2304, 128),
    ("vocab_size", 163840, 163840, 512),
    ("num_layers", 93, 27, 9),
    ("mla_layers", K3_MLA, (3, 7, 11, 15, 19, 23, 26), (3, 7, 8)),
    ("intermediate_size", 33792, 9216, 192),
    ("activation", "situ", "silu", "situ"),
    ("situ_beta", 4.0, 1.0, 4.0),
    ("situ_linear_beta", 25.0, None, 25.0),
    ("attn_res_block_size", 12, None, 4),
    ("norm_eps", 1e-5, 1e-5, 1e-5),
    ("tie_embeddings", False, False, False),
    ("max_positions", 1048576, 1048576, 4096),
    ("bos_id", 163584, 163584, 509),
    ("eos_ids", (163586,), (163586,), (510,)),
    ("stop_ids", (163585, 163586), (163585, 163586), (510,)),
    ("pad_id", 163839, 163839, 511),
    ("wrapped", True, False, True),
    ("expert_input", 3584, 2304, 64),
    ("kda.num_heads", 96, 32, 4),
    ("kda.head_dim", 128, 128, 16),
    ("kda.conv_width", 4, 4, 4),
    ("kda.gate_lower_bound", -5.0, None, -5.0),
    ("kda.full_rank_gate", True, False, True),
    ("mla.num_heads", 96, 32, 4),
    ("mla.query_rank", 1536, None, 48),
    ("mla.kv_rank", 512, 512, 32),
    ("mla.nope_dim", 128, 128, 16),
    ("mla.rope_dim", 64, 64, 8),
    ("mla.value_dim", 128, 128, 16),
    ("mla.latent_dim", 576, 576, 40),
    ("mla.output_gate", True, False, True),
    ("moe.num_experts", 896, 256, 16),
    ("moe.experts_per_token", 16, 8, 4),
    ("moe.num_shared", 2, 1, 2),
    ("moe.expert_width", 3072, 1024, 64),
    ("moe.latent_width", 3584, None, 64),
    ("moe.latent_norm", True, False, True),
    ("moe.router_score", "sigmoid", "sigmoid", "sigmoid"),
    ("moe.renormalize", True, True, True),
    ("moe.scaling_factor", 1.0, 2.446, 1.0),
    ("moe.num_groups", 1, 1, 1),
    ("moe.top_groups", 1, 1, 1),
    ("moe.first_layer", 1, 1, 1),
    ("moe.layer_freq", 1, 1, 1),
    ("moe.packed", True, False, True),
]
VISION = {
    "hidden_size": 1024,
    "attention_width": 1536,
    "intermediate_size": 4096,
    "num_layers": 27,
    "patch_size": 14,
    "table_height": 64,
    "table_width": 64,
    "merge": 2,
    "text_hidden_size": 7168,
}


def shipped(name):
    return json.loads((shipped_directory() / f"{name}.json").read_text())


def edited(name, changes):
    """A shipped config.json with fields changed: dotted path → value; `...` removes the field."""
    raw = shipped(name)
    for path, value in changes.items():
        *parents, last = path.split(".")
        branch = raw
        for parent in parents:
            branch = branch[parent]
        if value is ...:
            del branch[last]
        else:
            branch[last] = value
    return raw


def read(name, **changes):
    """A shipped configuration with fields of its text part changed; `__` in a name stands for a dot."""
    nested = "" if name == "kimi-linear-48b" else "text_config."
    return kj.ModelConfig.from_dict(edited(name, {nested + k.replace("__", "."): v for k, v in changes.items()}))


def complaint(raw):
    with pytest.raises(ConfigError) as caught:
        kj.ModelConfig.from_dict(raw)
    return str(caught.value)


# Facts


def test_names_of_the_shipped_configurations():
    assert shipped_configs() == SHIPPED


@pytest.mark.parametrize(("field", "k3", "linear", "tiny"), FACTS, ids=[row[0] for row in FACTS])
def test_facts(field, k3, linear, tiny):
    for name, wanted in zip(SHIPPED, (k3, k3, linear, tiny), strict=True):
        found = kj.ModelConfig.from_file(name)
        for part in field.split("."):
            found = getattr(found, part)
        assert (name, found, type(found)) == (name, wanted, type(wanted))


def test_k3_has_two_mla_layers_in_a_row_at_its_end():
    config = kj.ModelConfig.from_file("kimi-k3")
    assert len(config.mla_layers) == 24
    assert config.mla_layers[:2] + config.mla_layers[-3:] == (3, 7, 87, 91, 92)
    assert len(config.kda_layers) == 69
    assert sorted(config.mla_layers + config.kda_layers) == list(range(93))
    assert config.layer_kinds[90:] == ("kda", "mla", "mla")


def test_architectures_and_what_k31_adds():
    configs = {name: kj.ModelConfig.from_file(name) for name in SHIPPED}
    assert [config.architecture for config in configs.values()] == [
        "KimiK3ForConditionalGeneration",
        "KimiK31ForConditionalGeneration",
        "KimiLinearForCausalLM",
        "KimiK3ForConditionalGeneration",
    ]
    k3, k31 = configs["kimi-k3"], configs["kimi-k3.1-pro"]
    assert replace(k31, architecture=k3.architecture, indexer=None) == k3
    indexer = k31.indexer
    assert (indexer.num_heads, indexer.head_dim, indexer.top_k, indexer.layers) == (32, 128, 2048, K3_MLA)
    assert [k31.has_indexer(layer) for layer in (2, 3, 90, 91, 92)] == [False, True, False, True, True]
    assert all(configs[name].indexer is None for name in SHIPPED if name != "kimi-k3.1-pro")
    assert not k3.has_indexer(3)


def test_vision_facts():
    for name in SHIPPED:
        vision = kj.ModelConfig.from_file(name).vision
        assert (vision is None) == (name in ("kimi-linear-48b", "tiny-k3"))
        assert vision is None or vars(vision) == VISION


def test_published_config_is_the_shipped_one():
    if not PUBLISHED.is_file():
        pytest.skip(f"the published config.json is not at {PUBLISHED}")
    assert kj.ModelConfig.from_file(PUBLISHED) == kj.ModelConfig.from_file("kimi-k3")


def test_bundled_checkpoint_has_the_shipped_config():
    bundled = Path(kj.__file__).parent / "data" / "tiny-k3"
    assert kj.ModelConfig.from_file(bundled) == kj.ModelConfig.from_file("tiny-k3")
    assert kj.ModelConfig.from_file(str(bundled / "config.json")) == kj.ModelConfig.from_file("tiny-k3")


@pytest.mark.parametrize(
    ("first", "freq", "with_experts"),
    [(1, 1, [1, 2, 3, 4, 5, 6, 7, 8]), (0, 1, list(range(9))), (3, 2, [4, 6, 8]), (0, 4, [0, 4, 8]), (9, 1, [])],
)
def test_layers_with_experts(first, freq, with_experts):
    config = read("tiny-k3", first_k_dense_replace=first, moe_layer_freq=freq)
    assert [layer for layer in range(9) if config.has_experts(layer)] == with_experts


def test_frozen_and_hashable():
    one, other = (kj.ModelConfig.from_file("kimi-k3.1-pro") for _ in range(2))
    assert one == other
    assert {one: "found"}[other] == "found"
    assert read("kimi-k3.1-pro", num_experts_per_token=8) != one
    for part, field in [(one, "hidden_size"), (one.kda, "num_heads"), (one.indexer, "top_k"), (one.vision, "merge")]:
        with pytest.raises(FrozenInstanceError):
            setattr(part, field, 1)


# Forms that are accepted


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-k3.1-pro", "tiny-k3"])
def test_flat_k3(name):
    raw = shipped(name)
    config = kj.ModelConfig.from_dict(raw)
    text = raw.pop("text_config")
    for flat in (raw | text, raw | text | {"text_config": None}):
        assert kj.ModelConfig.from_dict(flat) == replace(config, architecture="KimiLinearForCausalLM")
    alone = replace(config, architecture="KimiLinearForCausalLM", vision=None)
    assert kj.ModelConfig.from_dict(text) == alone


def test_nested_kimi_linear():
    raw = shipped("kimi-linear-48b")
    nested = kj.ModelConfig.from_dict({"text_config": raw, "architectures": ["KimiLinearForCausalLM"]})
    assert nested == replace(kj.ModelConfig.from_dict(raw), wrapped=True)


@pytest.mark.parametrize("field", ["attn_res_block_size", "vision_config", "text_config"])
def test_null_does_not_make_kimi_linear_a_k3(field):
    assert kj.ModelConfig.from_dict(edited("kimi-linear-48b", {field: None})) == kj.ModelConfig.from_file(
        "kimi-linear-48b"
    )


def test_absent_and_null_fields_have_the_published_defaults():
    optional = {
        "activation_situ_beta": ("situ_beta", 1.0),
        "activation_situ_linear_beta": ("situ_linear_beta", None),
        "attn_res_block_size": ("attn_res_block_size", None),
        "tie_word_embeddings": ("tie_embeddings", False),
        "q_lora_rank": ("mla.query_rank", None),
        "mla_use_output_gate": ("mla.output_gate", False),
        "linear_attn_config.gate_lower_bound": ("kda.gate_lower_bound", None),
        "linear_attn_config.use_full_rank_gate": ("kda.full_rank_gate", False),
        "routed_expert_hidden_size": ("moe.latent_width", None),
        "latent_moe_use_norm": ("moe.latent_norm", False),
        "num_shared_experts": ("moe.num_shared", 0),
        "routed_scaling_factor": ("moe.scaling_factor", 1.0),
        "first_k_dense_replace": ("moe.first_layer", 0),
        "quantization_config": ("moe.packed", False),
        "moe_router_activation_func": ("moe.router_score", "sigmoid"),
        "moe_renormalize": ("moe.renormalize", True),
        "num_expert_group": ("moe.num_groups", 1),
        "topk_group": ("moe.top_groups", 1),
        "moe_layer_freq": ("moe.layer_freq", 1),
        "topk_method": ("num_layers", 93),
        "num_key_value_heads": ("mla.num_heads", 96),
        "mla_use_nope": ("num_layers", 93),
        "num_nextn_predict_layers": ("num_layers", 93),
    }
    for path, (field, wanted) in optional.items():
        for value in (..., None):
            found = kj.ModelConfig.from_dict(edited("kimi-k3", {f"text_config.{path}": value}))
            for part in field.split("."):
                found = getattr(found, part)
            assert (path, found) == (path, wanted)


@pytest.mark.parametrize(
    ("changes", "field", "wanted"),
    [
        ({"hidden_act": "silu"}, "activation", "silu"),
        ({"moe_router_activation_func": "softmax"}, "router_score", "softmax"),
        ({"moe_renormalize": False}, "renormalize", False),
        ({"num_expert_group": 8, "topk_group": 4}, "num_groups", 8),
        ({"tie_word_embeddings": True}, "tie_embeddings", True),
        ({"linear_attn_config__gate_lower_bound": -3}, "gate_lower_bound", -3.0),
        ({"rms_norm_eps": 1e-6}, "norm_eps", 1e-6),
        ({"attention_bias": False}, "hidden_size", 7168),
        ({"max_position_embeddings": ..., "model_max_length": 8192}, "max_positions", 8192),
        ({"max_position_embeddings": 4096, "model_max_length": 8192}, "max_positions", 4096),
        ({"quantization_config__config_groups": ...}, "packed", True),
        ({"quantization_config__config_groups__group_0__weights": None}, "packed", True),
        ({"anything_else": {"nobody": "needs"}}, "hidden_size", 7168),
    ],
    ids=str,
)
def test_accepted_values(changes, field, wanted):
    config = read("kimi-k3", **changes)
    found = next(getattr(part, field) for part in (config, config.kda, config.moe) if hasattr(part, field))
    assert (found, type(found)) == (wanted, type(wanted))


def test_quantization_and_tying_may_stand_in_the_outer_object():
    raw = shipped("kimi-k3")
    raw["quantization_config"] = raw["text_config"].pop("quantization_config")
    del raw["text_config"]["tie_word_embeddings"]
    raw["tie_word_embeddings"] = True
    config = kj.ModelConfig.from_dict(raw)
    assert config.moe.packed
    assert config.tie_embeddings


@pytest.mark.parametrize(
    ("text", "outer", "eos_ids", "stop_ids"),
    [
        (163586, 163586, (163586,), (163585, 163586)),
        ([163586], ..., (163586,), (163585, 163586)),
        (..., [7, 163586], (7, 163586), (7, 163585, 163586)),
        (None, 5, (5,), (5,)),
        ([], 5, (5,), (5,)),
        ([9, 3], 5, (9, 3), (3, 9)),
        (163585, ..., (163585,), (163585,)),
        (0, ..., (0,), (0,)),
        (..., ..., (), ()),
    ],
)
def test_end_of_sequence_ids(text, outer, eos_ids, stop_ids):
    changes = {"text_config.eos_token_id": text, "eos_token_id": outer}
    config = kj.ModelConfig.from_dict(edited("kimi-k3", changes))
    assert config.eos_ids == eos_ids
    assert config.stop_ids == stop_ids


def test_bos_and_pad_from_either_object():
    removed = {"text_config.bos_token_id": ..., "text_config.pad_token_id": None}
    config = kj.ModelConfig.from_dict(edited("kimi-k3", removed | {"bos_token_id": 0, "pad_token_id": 6}))
    assert (config.bos_id, config.pad_id) == (0, 6)
    config = kj.ModelConfig.from_dict(edited("kimi-k3", removed | {"bos_token_id": ..., "pad_token_id": None}))
    assert (config.bos_id, config.pad_id) == (None, None)
    assert config.stop_ids == (163586,)  # without [BOS] nothing tells the slot of [EOS]


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({"index_n_heads": 3, "index_head_dim": 5, "index_topk": 7, "layers": [8, 4]}, (3, 5, 7, (3, 7))),
        ({"n_heads": 3, "head_dim": 5, "topk": 7, "dsa_layers": [4]}, (3, 5, 7, (3,))),
        ({"top_k": 7, "dsa_layers": [93]}, (None, None, 7, (92,))),
        ({"index_n_heads": None, "n_heads": 3, "top_k": 7, "layers": [4]}, (3, None, 7, (3,))),
    ],
)
def test_keys_of_the_indexer(keys, sizes):
    indexer = read("kimi-k3.1-pro", dsa_config=keys).indexer
    assert (indexer.num_heads, indexer.head_dim, indexer.top_k, indexer.layers) == sizes
    assert not indexer.key_norm_bias


def test_sizes_of_the_file_go_before_those_of_the_tensors():
    config = read("kimi-k3.1-pro", dsa_config={"n_heads": 3, "top_k": 7, "layers": [4]})
    indexer = config.with_indexer_sizes(8, 16, key_norm_bias=True).indexer
    assert (indexer.num_heads, indexer.head_dim, indexer.key_norm_bias) == (3, 16, True)


# Layer lists


@pytest.mark.parametrize(
    ("kda", "mla", "words"),
    [
        ([1, 2, 3, 5, 6, 7], [4, 8], "layer 9 is listed neither in 'linear_attn_config.kda_layers' nor"),
        ([2, 3, 5, 6, 7], [4, 8, 9], "layer 1 is listed neither in 'linear_attn_config.kda_layers' nor"),
        ([1, 2, 3, 4, 5, 6, 7], [4, 8, 9], "'linear_attn_config.full_attn_layers': layer 4 is listed twice"),
        ([1, 2, 3, 3, 5, 6, 7], [4, 8, 9], "'linear_attn_config.kda_layers': layer 3 is listed twice"),
        ([0, 1, 2, 4, 5, 6], [3, 7, 8], "'linear_attn_config.kda_layers': layers are numbered from 1 to 9, found 0"),
        ([1, 2, 3, 5, 6, 7], [4, 8, 9, 10], "full_attn_layers': layers are numbered from 1 to 9, found 10"),
        ([1, 2, 3, 5, 6, 7, -1], [4, 8, 9], "kda_layers': layers are numbered from 1 to 9, found -1"),
        ([1, 2, 3, 5, 6, "7"], [4, 8, 9], "'linear_attn_config.kda_layers' must hold whole numbers, found '7'"),
        ([True, 2, 3, 5, 6, 7], [4, 8, 9], "'linear_attn_config.kda_layers' must hold whole numbers, found True"),
        ([1, 2, 3, 5, 6, 7], [4.0, 8, 9], "'linear_attn_config.full_attn_layers' must hold whole numbers, found 4.0"),
        (6, [4, 8, 9], "'linear_attn_config.kda_layers' must be a list of layer numbers, found 6"),
        ([1, 2, 3, 5, 6, 7], None, "'linear_attn_config.full_attn_layers' must be a list of layer numbers, found None"),
    ],
)
def test_layer_lists_that_are_wrong(kda, mla, words):
    changes = {"kda_layers": kda, "full_attn_layers": mla}
    assert words in complaint(edited("tiny-k3", {f"text_config.linear_attn_config.{k}": v for k, v in changes.items()}))


def test_layers_of_one_kind_only():
    lists = {"linear_attn_config__kda_layers": [], "linear_attn_config__full_attn_layers": list(range(9, 0, -1))}
    config = read("tiny-k3", **lists)
    assert config.mla_layers == tuple(range(9))
    assert config.kda_layers == ()


# Errors

REQUIRED = [
    "model_type", "hidden_act", "rms_norm_eps", "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size",
    "max_position_embeddings", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "num_experts", "num_experts_per_token", "moe_intermediate_size", "linear_attn_config",
    "linear_attn_config.num_heads", "linear_attn_config.head_dim", "linear_attn_config.short_conv_kernel_size",
    "linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers", "quantization_config.quant_method",
    "quantization_config.format",
]  # fmt: skip
REQUIRED_VISION = [
    "vt_hidden_size", "qkv_hidden_size", "vt_intermediate_size", "vt_num_hidden_layers", "patch_size",
    "init_pos_emb_height", "init_pos_emb_width", "text_hidden_size",
]  # fmt: skip
COUNTS = [
    "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "num_experts", "num_experts_per_token", "moe_intermediate_size", "routed_expert_hidden_size", "num_expert_group",
    "topk_group", "moe_layer_freq", "attn_res_block_size", "linear_attn_config.num_heads",
    "linear_attn_config.head_dim",
]  # fmt: skip


@pytest.mark.parametrize("field", REQUIRED)
def test_missing_field(field):
    assert complaint(edited("kimi-k3", {f"text_config.{field}": ...})) == f"field '{field}' is missing"


@pytest.mark.parametrize("field", REQUIRED_VISION)
def test_missing_vision_field(field):
    field = f"vision_config.{field}"
    assert complaint(edited("kimi-k3", {field: ...})) == f"field '{field}' is missing"


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [True, 1.0, "8", [8], 0, -1])
def test_sizes_are_whole_numbers_above_zero(field, value):
    wrong_type = isinstance(value, bool) or not isinstance(value, int)
    problem = f"must be a whole number, found {value!r}" if wrong_type else f"must be at least 1, found {value}"
    assert complaint(edited("kimi-k3", {f"text_config.{field}": value})) == f"field '{field}' {problem}"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        # type
        ("text_config", 5, "field 'text_config' must be an object, found 5"),
        ("text_config", [], "field 'text_config' must be an object, found []"),
        ("text_config.model_type", 5, "field 'model_type' must be a string, found 5"),
        ("text_config.hidden_act", None, "field 'hidden_act' must be a string, found None"),
        ("text_config.linear_attn_config", [], "field 'linear_attn_config' must be an object, found []"),
        ("text_config.rms_norm_eps", "1e-5", "field 'rms_norm_eps' must be a number, found '1e-5'"),
        ("text_config.rms_norm_eps", True, "field 'rms_norm_eps' must be a number, found True"),
        ("text_config.routed_scaling_factor", False, "field 'routed_scaling_factor' must be a number, found False"),
        ("text_config.mla_use_output_gate", 1, "field 'mla_use_output_gate' must be true or false, found 1"),
        ("text_config.latent_moe_use_norm", "true", "field 'latent_moe_use_norm' must be true or false, found 'true'"),
        ("text_config.moe_renormalize", 0, "field 'moe_renormalize' must be true or false, found 0"),
        ("text_config.tie_word_embeddings", 0, "field 'tie_word_embeddings' must be true or false, found 0"),
        ("tie_word_embeddings", "no", "field 'tie_word_embeddings' must be true or false, found 'no'"),
        ("text_config.linear_attn_config.use_full_rank_gate", 1,
         "field 'linear_attn_config.use_full_rank_gate' must be true or false, found 1"),
        ("architectures", "KimiK3", "field 'architectures' must be a list of names, found 'KimiK3'"),
        ("architectures", [3], "field 'architectures' must be a list of names, found [3]"),
        ("text_config.eos_token_id", "x", "field 'eos_token_id' must be a token id or a list of them, found 'x'"),
        ("text_config.eos_token_id", [1, True], "field 'eos_token_id' must be a token id or a list of them, found [1"),
        ("text_config.eos_token_id", -1, "field 'eos_token_id' must be a token id or a list of them, found -1"),
        ("text_config.bos_token_id", -1, "field 'bos_token_id' must be at least 0, found -1"),
        ("text_config.bos_token_id", [1], "field 'bos_token_id' must be a whole number, found [1]"),
        ("pad_token_id", 1.5, "field 'pad_token_id' must be a whole number, found 1.5"),
        ("text_config.quantization_config", "mxfp4", "field 'quantization_config' must be an object, found 'mxfp4'"),
        ("text_config.quantization_config.config_groups", ["group_0"],
         "field 'quantization_config.config_groups' must be an object, found ['group_0']"),
        ("text_config.quantization_config.config_groups", 5,
         "field 'quantization_config.config_groups' must be an object, found 5"),
        ("text_config.quantization_config.config_groups.group_0", None,
         "field 'quantization_config.config_groups.group_0' must be an object, found None"),
        ("vision_config", [1], "field 'vision_config' must be an object, found [1]"),
        ("vision_config.patch_size", 14.0, "field 'vision_config.patch_size' must be a whole number, found 14.0"),
        # not implemented
        ("text_config.model_type", "deepseek_v3", "field 'model_type': 'deepseek_v3' is not implemented, only 'kimi_"),
        ("text_config.hidden_act", "gelu", "field 'hidden_act': 'gelu' is not implemented, only 'silu' or 'situ'"),
        ("text_config.mla_use_nope", False, "field 'mla_use_nope': False is not implemented, rotary"),
        ("text_config.topk_method", "greedy", "field 'topk_method': 'greedy' is not implemented, only 'noaux_tc'"),
        ("text_config.num_nextn_predict_layers", 1, "field 'num_nextn_predict_layers': 1 is not implemented, multi-"),
        ("text_config.attention_bias", True, "field 'attention_bias': True is not implemented, projections have"),
        ("text_config.num_key_value_heads", 8,
         "field 'num_key_value_heads': 8 is not implemented, it must equal num_attention_heads = 96"),
        ("text_config.moe_router_activation_func", "tanh",
         "field 'moe_router_activation_func': 'tanh' is not implemented, only 'sigmoid' or 'softmax'"),
        ("text_config.quantization_config.quant_method", "fp8",
         "field 'quantization_config.quant_method': 'fp8' is not implemented, only 'compressed-tensors'"),
        ("text_config.quantization_config.format", "nvfp4-pack-quantized",
         "field 'quantization_config.format': 'nvfp4-pack-quantized' is not implemented, only 'mxfp4-pack-quantized'"),
        ("text_config.quantization_config.config_groups.group_0.weights.group_size", 16,
         "field 'quantization_config.config_groups.group_0.weights.group_size': 16 is not implemented, MXFP4 has"),
        ("text_config.quantization_config.config_groups.group_0.weights.num_bits", 8,
         "field 'quantization_config.config_groups.group_0.weights.num_bits': 8 is not implemented, MXFP4 has 4"),
        ("vision_config.merge_kernel_size", [4, 4],
         "field 'vision_config.merge_kernel_size': [4, 4] is not implemented, only [2, 2]"),
        ("vision_config.merge_kernel_size", 2,
         "field 'vision_config.merge_kernel_size': 2 is not implemented, only [2, 2]"),
        # range
        ("text_config.rms_norm_eps", 0, "field 'rms_norm_eps' must be positive, found 0.0"),
        ("text_config.rms_norm_eps", float("nan"), "field 'rms_norm_eps' must be "),
        ("text_config.rms_norm_eps", float("inf"), "field 'rms_norm_eps' must be "),
        ("text_config.routed_scaling_factor", float("nan"), "field 'routed_scaling_factor' must be "),
        ("text_config.activation_situ_beta", 0.0, "field 'activation_situ_beta' must be positive, found 0.0"),
        ("text_config.activation_situ_beta", float("inf"), "field 'activation_situ_beta' must be "),
        ("text_config.activation_situ_linear_beta", -25.0, "field 'activation_situ_linear_beta' must be positive, "),
        ("text_config.linear_attn_config.gate_lower_bound", 0,
         "field 'linear_attn_config.gate_lower_bound' must be negative (or absent, for the unbounded gate), found 0.0"),
        ("text_config.linear_attn_config.gate_lower_bound", 5.0,
         "field 'linear_attn_config.gate_lower_bound' must be negative (or absent, for the unbounded gate), found 5.0"),
        ("text_config.linear_attn_config.gate_lower_bound", float("-inf"),
         "field 'linear_attn_config.gate_lower_bound' must be "),
        ("text_config.linear_attn_config.short_conv_kernel_size", 1,
         "field 'linear_attn_config.short_conv_kernel_size' must be at least 2, found 1"),
        ("text_config.num_shared_experts", -1, "field 'num_shared_experts' must be at least 0, found -1"),
        ("text_config.first_k_dense_replace", -1, "field 'first_k_dense_replace' must be at least 0, found -1"),
        ("text_config.num_experts_per_token", 897,
         "field 'num_experts_per_token': 897 cannot be chosen from 1 groups of 896 experts"),
        ("text_config.num_expert_group", 9, "field 'num_expert_group': 9 groups do not divide 896 experts"),
        ("text_config.topk_group", 2, "field 'topk_group': 2 of 1 groups cannot be chosen"),
        ("text_config.num_expert_group", 896,
         "field 'num_experts_per_token': 16 cannot be chosen from 1 groups of 1 experts"),
        ("text_config.moe_intermediate_size", 3088,
         "field 'moe_intermediate_size': MXFP4 experts need a multiple of 32, found 3088"),
        ("text_config.routed_expert_hidden_size", 3600,
         "field 'routed_expert_hidden_size': MXFP4 experts need a multiple of 32, found 3600"),
    ],
    ids=lambda value: None,
)  # fmt: skip
def test_refused_value(path, value, words):
    assert complaint(edited("kimi-k3", {path: value})).startswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_expert_group": 896, "topk_group": 16},
            "field 'num_expert_group': 896 groups leave fewer than two experts in each",
        ),
        (
            {"num_expert_group": 112, "topk_group": 1},
            "field 'num_experts_per_token': 16 cannot be chosen from 1 groups of 8 experts",
        ),
        (
            {"routed_expert_hidden_size": None, "hidden_size": 7184},
            "field 'hidden_size': MXFP4 experts need a multiple of 32, found 7184",
        ),
        (
            {"model_max_length": 0, "max_position_embeddings": None},
            "field 'model_max_length' must be at least 1, found 0",
        ),
    ],
)
def test_refused_combination(changes, words):
    assert complaint(edited("kimi-k3", {f"text_config.{k}": v for k, v in changes.items()})) == words


def test_unpacked_experts_need_no_multiple_of_32():
    assert read("kimi-linear-48b", moe_intermediate_size=48).moe.expert_width == 48


@pytest.mark.parametrize(
    ("dsa", "words"),
    [
        ([], "field 'dsa_config' must be an object, found []"),
        ({"layers": [4]}, "field 'dsa_config': none of the keys 'index_topk', 'topk', 'top_k' is present"),
        ({"top_k": 8}, "field 'dsa_config': neither of the keys 'layers', 'dsa_layers' is present"),
        ({"topk": 0, "layers": [4]}, "field 'dsa_config.topk' must be at least 1, found 0"),
        ({"top_k": 8.0, "layers": [4]}, "field 'dsa_config.top_k' must be a whole number, found 8.0"),
        (
            {"index_topk": 8, "n_heads": True, "layers": [4]},
            "field 'dsa_config.n_heads' must be a whole number, found T",
        ),
        ({"index_topk": 8, "index_head_dim": 0, "layers": [4]}, "field 'dsa_config.index_head_dim' must be at least 1"),
        ({"index_topk": 8, "layers": 4}, "field 'dsa_config.layers' must be a list of layer numbers, found 4"),
        ({"index_topk": 8, "layers": [4, 5]}, "field 'dsa_config.layers': layer 5 is not in full_attn_layers"),
        ({"index_topk": 8, "dsa_layers": [3]}, "field 'dsa_config.dsa_layers': layer 3 is not in full_attn_layers"),
        ({"index_topk": 8, "layers": [0]}, "field 'dsa_config.layers': layer 0 is not in full_attn_layers"),
        ({"index_topk": 8, "layers": [94]}, "field 'dsa_config.layers': layer 94 is not in full_attn_layers"),
        ({"index_topk": 8, "layers": [4, 8, 4]}, "field 'dsa_config.layers': a layer is listed twice in [4, 8, 4]"),
    ],
)
def test_refused_indexer(dsa, words):
    assert complaint(edited("kimi-k3.1-pro", {"text_config.dsa_config": dsa})).startswith(words)


def test_indexer_needs_the_query_latent():
    words = "field 'dsa_config': the indexer reads the query latent, but 'q_lora_rank' is null"
    assert complaint(edited("kimi-k3.1-pro", {"text_config.q_lora_rank": None})) == words


# Files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a JSON file: Expecting value"),
        (b"{'a': 1}", "is not a JSON file: Expecting property name"),
        (b'{"text_config": {', "is not a JSON file: "),
        (b"\xff\xfe\x00", "is not a JSON file: 'utf-8' codec"),
        (b"[1]", "must hold one JSON object, found list"),
        (b"null", "must hold one JSON object, found NoneType"),
        (b"{}", ": field 'model_type' is missing"),
    ],
)
def test_file_that_is_not_a_configuration(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for source in (path, str(path), tmp_path):
        with pytest.raises(ConfigError) as caught:
            kj.ModelConfig.from_file(source)
        assert str(caught.value).startswith(str(path))
        assert words in str(caught.value)


def test_errors_of_a_file_name_it(tmp_path):
    path = tmp_path / "my.json"
    path.write_text(json.dumps(edited("kimi-k3", {"text_config.hidden_act": "gelu"})))
    with pytest.raises(ConfigError) as caught:
        kj.ModelConfig.from_file(path)
    assert str(caught.value).startswith(f"{path}: field 'hidden_act': 'gelu' is not implemented")


def test_directory_without_a_config(tmp_path):
    with pytest.raises(ConfigError) as caught:
        kj.ModelConfig.from_file(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'} does not exist")


@pytest.mark.parametrize("source", ["kimi-k4", "kimi-k3.json", "nowhere/kimi-k3", "/nowhere/config.json", "*"])
def test_unknown_source_lists_the_shipped_names(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        kj.ModelConfig.from_file(source)
    assert str(caught.value).startswith(f"{source} is neither a file, a directory, nor a shipped configuration")
    assert all(name in str(caught.value) for name in SHIPPED)


def test_from_dict_leaves_its_argument_alone():
    raw = shipped("kimi-k3.1-pro")
    before = deepcopy(raw)
    kj.ModelConfig.from_dict(raw)
    assert raw == before
