"""What a configuration amounts to: parameters, checkpoint bytes, cache and state bytes, exactly."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.checkpoint.names import is_stacked, stored_shapes, vision_tensors
from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import KDACache, MLACache, cache_layout
from kimi_jax.model.model import abstract_params

_COMPONENTS = (
    (".experts.", "routed experts"),
    (".shared_experts.", "shared experts"),
    (".block_sparse_moe.gate.", "router"),
    (".routed_expert_", "latent projections"),
    (".indexer.", "indexer"),
    (".self_attn.", "attention"),
    (".mlp.", "dense MLP"),
    ("embed_tokens.", "embedding"),
    ("lm_head.", "head"),
    ("", "norms and residual mixes"),
)


@dataclass(frozen=True)
class Account:
    """The numbers of one configuration.

    - `layers`: layers by kind; `parameters`: numbers by component, packed ones counted one by one, scales not at all,
        `A_log` one a head; text only.
    - `active_parameters`: numbers that a token meets: all but the embedding table and the experts not chosen.
    - `vision_parameters`: of the vision tower and projector.
    - `bytes`: of the published checkpoint, by component and dtype, vision included.
    - `cache_bytes_per_token`: growing with length, in bfloat16. `state_bytes`: KDA states of a sequence, float32.
    - `conv_bytes`: inputs of the short convolutions kept for a sequence, bfloat16.
    """

    layers: dict[str, int]
    parameters: dict[str, int]
    active_parameters: int
    vision_parameters: int
    bytes: dict[str, dict[str, int]]
    cache_bytes_per_token: int
    state_bytes: int
    conv_bytes: int

    @property
    def text_parameters(self) -> int:
        """Numbers of the language model."""
        return sum(self.parameters.values())

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(sum(by_dtype.values()) for by_dtype in self.bytes.values())


@cache
def account(config: ModelConfig) -> Account:
    """Counts everything from the configuration alone."""
    parameters: Counter[str] = Counter()
    sizes: dict[str, Counter[str]] = {}
    for param, (declared, _) in abstract_params(config).items():
        component = next(name for mark, name in _COMPONENTS if mark in f".{param}")
        if component == "attention":
            component = f"{config.layer_kinds[int(param.split('.')[1])].upper()} attention"
        if not param.endswith(".weight_scale"):
            parameters[component] += declared.size * (2 if param.endswith(".weight_packed") else 1)
        stored = declared.shape if is_stacked(param) else stored_shapes(config, param, declared.shape)[0]
        by_dtype = sizes.setdefault(component, Counter())
        by_dtype[declared.dtype.name] += math.prod(stored) * declared.dtype.itemsize
    vision = 0
    if config.vision is not None:
        vision = sum(math.prod(tensor.shapes[0]) for tensor in vision_tensors(config.vision))
        sizes["vision tower and projector"] = Counter(bfloat16=2 * vision)
    experts = parameters["routed experts"]
    chosen = experts // config.moe.num_experts * config.moe.experts_per_token
    head = parameters["embedding"] if config.tie_embeddings else 0
    active = sum(parameters.values()) - experts + chosen - parameters["embedding"] + head
    return Account(
        layers=_layers(config),
        parameters=dict(parameters),
        active_parameters=active,
        vision_parameters=vision,
        bytes={component: dict(by_dtype) for component, by_dtype in sizes.items()},
        **_cache_bytes(config),
    )


def _layers(config: ModelConfig) -> dict[str, int]:
    moe = sum(config.has_experts(i) for i in range(config.num_layers))
    counts = {
        "KDA attention": len(config.kda_layers),
        "MLA attention": len(config.mla_layers),
        "with indexer": sum(config.has_indexer(i) for i in range(config.num_layers)),
        "mixture of experts": moe,
        "dense MLP": config.num_layers - moe,
    }
    return {kind: count for kind, count in counts.items() if count}


def _cache_bytes(config: ModelConfig) -> dict[str, int]:
    layout, _ = cache_layout(config, jnp.dtype(jnp.bfloat16), batch=1, max_len=1)

    def size(*arrays: jax.ShapeDtypeStruct | None) -> int:
        return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in arrays if x is not None)

    kda = [layer for layer in layout.layers if isinstance(layer, KDACache)]
    mla = [layer for layer in layout.layers if isinstance(layer, MLACache)]
    return {
        # Of latents what is in them: the cache of a layer with an indexer pads them.
        "cache_bytes_per_token": sum(2 * config.mla.latent_dim + size(layer.index_keys) for layer in mla),
        "state_bytes": sum(size(layer.state) for layer in kda),
        "conv_bytes": sum(size(layer.conv_tail) for layer in kda),
    }
