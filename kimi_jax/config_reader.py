"""From the fields of a `config.json` to a `ModelConfig`: types, ranges, and what is not implemented."""

import math
from collections.abc import Mapping
from typing import Any, get_args

from kimi_jax.config import (
    MXFP4_GROUP,
    Activation,
    ConfigError,
    IndexerConfig,
    KDAConfig,
    LayerKind,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RouterScore,
    VisionConfig,
)

_MISSING = object()


class _Fields:
    """Typed access to one JSON object; every complaint names the field and the value found."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self.raw = raw
        self.prefix = prefix

    def _get(self, name: str, kinds: tuple[type, ...], default: Any, what: str) -> Any:
        value = self.raw.get(name, _MISSING)
        if value is _MISSING or (value is None and default is not _MISSING):
            if default is _MISSING:
                raise ConfigError(f"field '{self.prefix}{name}' is missing")
            return default
        # JSON's true is an int in Python, and a number where a flag belongs is a mistake both ways round.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"field '{self.prefix}{name}' must be {what}, found {value!r}")
        return value

    def count(self, name: str, default: Any = _MISSING, least: int = 1) -> Any:
        value = self._get(name, (int,), default, "a whole number")
        if value is not default and value < least:
            raise ConfigError(f"field '{self.prefix}{name}' must be at least {least}, found {value}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> Any:
        value = self._get(name, (int, float), default, "a number")
        if value is default:
            return default
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ConfigError(f"field '{self.prefix}{name}' must be a finite number, found {value}")
        return number

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        return bool(self._get(name, (bool,), default, "true or false"))

    def text(self, name: str, default: Any = _MISSING) -> Any:
        return self._get(name, (str,), default, "a string")

    def choice(self, name: str, allowed: tuple[str, ...], default: Any = _MISSING) -> Any:
        value = self.text(name, default)
        if value not in allowed:
            names = " or ".join(repr(a) for a in allowed)
            raise ConfigError(f"field '{self.prefix}{name}': {value!r} is not implemented, only {names}")
        return value

    def only(self, name: str, allowed: Any, why: str) -> None:
        """Refuses a value other than `allowed` (absent and null count as `allowed`)."""
        value = self.raw.get(name)
        if value is not None and (value != allowed or isinstance(value, bool) != isinstance(allowed, bool)):
            raise ConfigError(f"field '{self.prefix}{name}': {value!r} is not implemented, {why}")

    def counts(self, name: str) -> tuple[int, ...]:
        values = self._get(name, (list,), _MISSING, "a list of layer numbers")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"field '{self.prefix}{name}' must hold whole numbers, found {value!r}")
        return tuple(values)

    def first(self, *names: str) -> str | None:
        """The first of `names` that is present and not null."""
        return next((name for name in names if self.raw.get(name) is not None), None)

    def object(self, name: str) -> "_Fields":
        value = self._get(name, (dict,), _MISSING, "an object")
        return _Fields(value, f"{self.prefix}{name}.")


def read_model(raw: Mapping[str, Any]) -> ModelConfig:
    """Builds a `ModelConfig` from the parsed `config.json`; see `ModelConfig.from_file`."""
    nested = raw.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ConfigError(f"field 'text_config' must be an object, found {nested!r}")
    outer, text = _Fields(raw), _Fields(raw if nested is None else nested)
    text.choice("model_type", ("kimi_linear",))
    text.only("mla_use_nope", True, "rotary position embedding does not exist in these models")
    text.only("topk_method", "noaux_tc", "only 'noaux_tc' routing exists in these models")
    text.only("num_nextn_predict_layers", 0, "multi-token prediction layers are not supported")
    text.only("attention_bias", False, "projections have no bias")
    activation: Activation = text.choice("hidden_act", get_args(Activation))
    block = text.count("attn_res_block_size", None)
    eps = text.number("rms_norm_eps")
    if not eps > 0:
        raise ConfigError(f"field 'rms_norm_eps' must be positive, found {eps}")
    num_layers = text.count("num_hidden_layers")
    linear = text.object("linear_attn_config")
    kinds = _layer_kinds(linear, num_layers)
    mla = _read_mla(text)
    limit = text.first("max_position_embeddings", "model_max_length") or "max_position_embeddings"
    return ModelConfig(
        architecture=_architecture(outer),
        wrapped=nested is not None or block is not None or raw.get("vision_config") is not None,
        hidden_size=text.count("hidden_size"),
        vocab_size=text.count("vocab_size"),
        layer_kinds=kinds,
        intermediate_size=text.count("intermediate_size"),
        activation=activation,
        situ_beta=_positive(text, "activation_situ_beta", 1.0),
        situ_linear_beta=_positive(text, "activation_situ_linear_beta", None),
        attn_res_block_size=block,
        norm_eps=eps,
        tie_embeddings=text.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", False)),
        max_positions=text.count(limit),
        bos_id=text.count("bos_token_id", outer.count("bos_token_id", None, 0), 0),
        eos_ids=token_ids(text.raw, "eos_token_id") or token_ids(outer.raw, "eos_token_id"),
        pad_id=text.count("pad_token_id", outer.count("pad_token_id", None, 0), 0),
        kda=_read_kda(linear),
        mla=mla,
        moe=_read_moe(text, outer),
        indexer=_read_indexer(text, kinds),
        vision=_read_vision(outer) if outer.raw.get("vision_config") is not None else None,
    )


def _architecture(outer: _Fields) -> str:
    names = outer.raw.get("architectures") or ["KimiLinearForCausalLM"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(f"field 'architectures' must be a list of names, found {names!r}")
    return names[0]


def _positive(fields: _Fields, name: str, default: float | None) -> Any:
    value = fields.number(name, default)
    if value is not None and not value > 0:
        raise ConfigError(f"field '{name}' must be positive, found {value}")
    return value


def token_ids(raw: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The token ids under `name` in a config or generation config: one number, a list, or nothing."""
    value = raw.get(name)
    values = [] if value is None else value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ConfigError(f"field '{name}' must be a token id or a list of them, found {value!r}")
    return tuple(values)


def _layer_kinds(linear: _Fields, num_layers: int) -> tuple[LayerKind, ...]:
    kinds: dict[int, LayerKind] = {}
    names: dict[str, LayerKind] = {"kda_layers": "kda", "full_attn_layers": "mla"}
    for name, kind in names.items():
        for layer in linear.counts(name):
            field = f"field '{linear.prefix}{name}'"
            if not 1 <= layer <= num_layers:
                raise ConfigError(f"{field}: layers are numbered from 1 to {num_layers}, found {layer}")
            if layer in kinds:
                raise ConfigError(f"{field}: layer {layer} is listed twice")
            kinds[layer] = kind
    absent = [layer for layer in range(1, num_layers + 1) if layer not in kinds]
    if absent:
        both = " nor ".join(f"'{linear.prefix}{name}'" for name in names)
        raise ConfigError(f"layer {absent[0]} is listed neither in {both}")
    return tuple(kinds[layer] for layer in range(1, num_layers + 1))


def _read_kda(linear: _Fields) -> KDAConfig:
    bound = linear.number("gate_lower_bound", None)
    if bound is not None and not bound < 0:
        raise ConfigError(
            f"field '{linear.prefix}gate_lower_bound' must be negative (or absent, for the unbounded gate), "
            f"found {bound}"
        )
    return KDAConfig(
        num_heads=linear.count("num_heads"),
        head_dim=linear.count("head_dim"),
        conv_width=linear.count("short_conv_kernel_size", least=2),
        gate_lower_bound=bound,
        full_rank_gate=linear.flag("use_full_rank_gate", False),
    )


def _read_mla(text: _Fields) -> MLAConfig:
    heads = text.count("num_attention_heads")
    text.only("num_key_value_heads", heads, f"it must equal num_attention_heads = {heads}")
    return MLAConfig(
        num_heads=heads,
        query_rank=text.count("q_lora_rank", None),
        kv_rank=text.count("kv_lora_rank"),
        nope_dim=text.count("qk_nope_head_dim"),
        rope_dim=text.count("qk_rope_head_dim"),
        value_dim=text.count("v_head_dim"),
        output_gate=text.flag("mla_use_output_gate", False),
    )


def _read_moe(text: _Fields, outer: _Fields) -> MoEConfig:
    packed = _is_packed(text) or _is_packed(outer)
    experts = text.count("num_experts")
    per_token = text.count("num_experts_per_token")
    groups = text.count("num_expert_group", 1)
    top_groups = text.count("topk_group", 1)
    width = text.count("moe_intermediate_size")
    latent = text.count("routed_expert_hidden_size", None)
    if experts % groups:
        raise ConfigError(f"field 'num_expert_group': {groups} groups do not divide {experts} experts")
    if top_groups > groups:
        raise ConfigError(f"field 'topk_group': {top_groups} of {groups} groups cannot be chosen")
    if per_token > experts // groups * top_groups:
        raise ConfigError(
            f"field 'num_experts_per_token': {per_token} cannot be chosen from "
            f"{top_groups} groups of {experts // groups} experts"
        )
    if groups > top_groups and experts // groups < 2:
        raise ConfigError(f"field 'num_expert_group': {groups} groups leave fewer than two experts in each")
    if packed:
        contracted = {
            "moe_intermediate_size": width,
            "routed_expert_hidden_size" if latent else "hidden_size": latent or text.count("hidden_size"),
        }
        for name, size in contracted.items():
            if size % MXFP4_GROUP:
                raise ConfigError(f"field '{name}': MXFP4 experts need a multiple of {MXFP4_GROUP}, found {size}")
    score: RouterScore = text.choice("moe_router_activation_func", get_args(RouterScore), "sigmoid")
    return MoEConfig(
        num_experts=experts,
        experts_per_token=per_token,
        num_shared=text.count("num_shared_experts", 0, least=0),
        expert_width=width,
        latent_width=latent,
        latent_norm=text.flag("latent_moe_use_norm", False),
        router_score=score,
        renormalize=text.flag("moe_renormalize", True),
        scaling_factor=text.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=top_groups,
        first_layer=text.count("first_k_dense_replace", 0, least=0),
        layer_freq=text.count("moe_layer_freq", 1),
        packed=packed,
    )


def _is_packed(fields: _Fields) -> bool:
    if fields.raw.get("quantization_config") is None:
        return False
    quantization = fields.object("quantization_config")
    quantization.choice("quant_method", ("compressed-tensors",))
    quantization.choice("format", ("mxfp4-pack-quantized",))
    if quantization.raw.get("config_groups") is None:
        return True
    groups = quantization.object("config_groups")
    for name in groups.raw:
        group = groups.object(name)
        group.only("format", "mxfp4-pack-quantized", "only MXFP4 experts are supported")
        if group.raw.get("weights") is not None:
            weights = group.object("weights")
            weights.only("group_size", MXFP4_GROUP, "MXFP4 has groups of 32")
            weights.only("num_bits", 4, "MXFP4 has 4 bits")
    return True


def _read_indexer(text: _Fields, kinds: tuple[LayerKind, ...]) -> IndexerConfig | None:
    if text.raw.get("dsa_config") is None:
        return None
    dsa = text.object("dsa_config")

    def named(*names: str) -> int | None:
        name = dsa.first(*names)
        return None if name is None else dsa.count(name)

    top_k = named("index_topk", "topk", "top_k")
    if top_k is None:
        raise ConfigError("field 'dsa_config': none of the keys 'index_topk', 'topk', 'top_k' is present")
    layers_name = dsa.first("layers", "dsa_layers")
    if layers_name is None:
        raise ConfigError("field 'dsa_config': neither of the keys 'layers', 'dsa_layers' is present")
    layers = dsa.counts(layers_name)
    for layer in layers:
        if not 1 <= layer <= len(kinds) or kinds[layer - 1] != "mla":
            raise ConfigError(f"field 'dsa_config.{layers_name}': layer {layer} is not in full_attn_layers")
    if len(set(layers)) != len(layers):
        raise ConfigError(f"field 'dsa_config.{layers_name}': a layer is listed twice in {list(layers)}")
    if text.raw.get("q_lora_rank") is None:
        raise ConfigError("field 'dsa_config': the indexer reads the query latent, but 'q_lora_rank' is null")
    return IndexerConfig(
        num_heads=named("index_n_heads", "n_heads"),
        head_dim=named("index_head_dim", "head_dim"),
        top_k=top_k,
        layers=tuple(sorted(layer - 1 for layer in layers)),
    )


def _read_vision(outer: _Fields) -> VisionConfig:
    vision = outer.object("vision_config")
    merge = vision.raw.get("merge_kernel_size", [2, 2])
    if merge != [2, 2]:
        raise ConfigError(f"field 'vision_config.merge_kernel_size': {merge!r} is not implemented, only [2, 2]")
    return VisionConfig(
        hidden_size=vision.count("vt_hidden_size"),
        attention_width=vision.count("qkv_hidden_size"),
        intermediate_size=vision.count("vt_intermediate_size"),
        num_layers=vision.count("vt_num_hidden_layers"),
        patch_size=vision.count("patch_size"),
        table_height=vision.count("init_pos_emb_height"),
        table_width=vision.count("init_pos_emb_width"),
        merge=merge[0],
        text_hidden_size=vision.count("text_hidden_size"),
    )
