"""The configuration of a Kimi K3, K3.1 or Kimi-Linear model, read from a Hugging Face `config.json`.

`ModelConfig.from_file` accepts the nested form (`text_config` inside, as K3 ships it) and the flat one
(Kimi-Linear). Layer numbers are 1-based in the files and 0-based everywhere in this package; the
subtraction happens here, once. Fields nobody needs are ignored; a field that is known but holds a value
this package does not implement is an error that names the field and the value.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

LayerKind = Literal["kda", "mla"]
Activation = Literal["silu", "situ"]
RouterScore = Literal["sigmoid", "softmax"]

MXFP4_GROUP = 32
"""Inputs that share one MXFP4 scale byte."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the field and the value."""


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention: `num_heads` N, `head_dim` K = V, `conv_width` taps of the short convolutions.

    `gate_lower_bound` is the bound of the forget gate's logarithm (K3: -5), or None for the unbounded
    softplus form. `full_rank_gate` tells one output-gate matrix `g_proj` from the pair `g_a_proj`, `g_b_proj`.
    """

    num_heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None
    full_rank_gate: bool


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention without rotary embedding.

    `query_rank` Q is None where queries come from one full matrix; `kv_rank` C is the width of the cached
    latent; a head's key has `nope_dim` + `rope_dim` (R) numbers, its value `value_dim` (V).
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    output_gate: bool

    @property
    def latent_dim(self) -> int:
        """Numbers cached for a token and layer: the latent C and the unrotated extra width R."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class IndexerConfig:
    """The sparse-attention indexer of K3.1's MLA layers (`layers` is 0-based).

    `num_heads` and `head_dim` are None where the file leaves them out: the checkpoint's shapes tell them, and
    its names whether the key norm has a bias (`with_indexer_sizes`).
    """

    num_heads: int | None
    head_dim: int | None
    top_k: int
    layers: tuple[int, ...]
    key_norm_bias: bool = False


@dataclass(frozen=True)
class MoEConfig:
    """The mixture of experts: E = `num_experts`, A = `experts_per_token`, F = `expert_width`.

    `latent_width` L is the width the routed experts work in, None where they work on the hidden state.
    `packed` says that the experts are stored in MXFP4.
    """

    num_experts: int
    experts_per_token: int
    num_shared: int
    expert_width: int
    latent_width: int | None
    latent_norm: bool
    router_score: RouterScore
    renormalize: bool
    scaling_factor: float
    num_groups: int
    top_groups: int
    first_layer: int
    layer_freq: int
    packed: bool


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower and projector, enough to count their tensors."""

    hidden_size: int
    attention_width: int
    intermediate_size: int
    num_layers: int
    patch_size: int
    table_height: int
    table_width: int
    merge: int
    text_hidden_size: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything the model's shapes and arithmetic depend on. Immutable and hashable.

    `wrapped` tells K3's kind of checkpoint (the configuration nested under `text_config`, names under
    `language_model.`, small recurrent parameters in float32) from Kimi-Linear's flat one.
    """

    architecture: str
    wrapped: bool
    hidden_size: int
    vocab_size: int
    layer_kinds: tuple[LayerKind, ...]
    intermediate_size: int
    activation: Activation
    situ_beta: float
    situ_linear_beta: float | None
    attn_res_block_size: int | None
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig
    indexer: IndexerConfig | None = None
    vision: VisionConfig | None = None

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_kinds)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based numbers of the KDA layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based numbers of the MLA layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "mla")

    @property
    def expert_input(self) -> int:
        """Width that the routed experts read and write."""
        return self.moe.latent_width or self.hidden_size

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation.

        The configured end-of-sequence ids. Where that id is `<|end_of_msg|>`, the third special slot, `[EOS]`
        in the second slot ends a generation too: K3 was seen to emit either.
        """
        ids = set(self.eos_ids)
        if self.bos_id is not None and self.bos_id + 2 in ids:
            ids.add(self.bos_id + 1)
        return tuple(sorted(ids))

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) has the mixture of experts in place of the dense MLP."""
        return layer >= self.moe.first_layer and layer % self.moe.layer_freq == 0

    def has_indexer(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) chooses its keys with a sparse-attention indexer."""
        return self.indexer is not None and layer in self.indexer.layers

    def with_indexer_sizes(self, num_heads: int, head_dim: int, key_norm_bias: bool) -> "ModelConfig":
        """This configuration with what only a checkpoint's tensors tell of the indexer."""
        if self.indexer is None:
            return self
        indexer = replace(
            self.indexer,
            num_heads=self.indexer.num_heads or num_heads or None,
            head_dim=self.indexer.head_dim or head_dim or None,
            key_norm_bias=key_norm_bias,
        )
        return replace(self, indexer=indexer)

    @classmethod
    def from_file(cls, source: "str | Path") -> "ModelConfig":
        """Reads a configuration.

        **Arguments:**

        - `source`: a `config.json`, a directory that holds one, or the name of a shipped configuration
            (see `shipped_configs`).

        **Raises:** `ConfigError` for a file that is missing, is not JSON, or holds a field that is missing,
        has the wrong type or has a value that is not implemented.
        """
        path = find_config(source)
        raw = read_json_object(path)
        try:
            return cls.from_dict(raw)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Reads a configuration from the parsed `config.json`, nested or flat; see `from_file`."""
        from kimi_jax.config_reader import read_model  # it builds the classes of this module

        return read_model(raw)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; `ConfigError` names the file where it holds none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a JSON file: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold one JSON object, found {type(raw).__name__}")
    return raw


def shipped_directory() -> Path:
    """Directory of the shipped model configurations: inside the package, or the source checkout's `configs/`."""
    installed = Path(__file__).parent / "configs" / "models"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "configs" / "models"


def shipped_configs() -> tuple[str, ...]:
    """Names that `ModelConfig.from_file` accepts in place of a path."""
    return tuple(sorted(path.stem for path in shipped_directory().glob("*.json")))


def find_config(source: str | Path) -> Path:
    """The `config.json` that `source` (a file, a directory, or a shipped name) stands for."""
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path} does not exist: the directory holds no config.json")
        return path
    if path.is_file():
        return path
    shipped = shipped_directory() / f"{source}.json"
    if path.name == str(source) and shipped.is_file():
        return shipped
    raise ConfigError(
        f"{source} is neither a file, a directory, nor a shipped configuration ({', '.join(shipped_configs())})"
    )
