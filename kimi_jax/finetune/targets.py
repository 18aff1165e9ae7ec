"""Which modules get adapters: from groups, names and patterns to the modules of one model."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf

from kimi_jax.checkpoint.adapters import adaptable_names
from kimi_jax.config import ModelConfig
from kimi_jax.model.lora import AdapterSpec

GROUPS = {
    "attention": ("*.self_attn.*_proj", "*.self_attn.kv_a_proj_with_mqa"),
    "shared_experts": ("*.shared_experts.*",),
    "experts": ("*.block_sparse_moe.experts.*",),
    "latent": ("*.routed_expert_down_proj", "*.routed_expert_up_proj"),
    "mlp": ("*.mlp.*",),
    "head": ("lm_head",),
}
"""Sets of modules that have a name of their own."""


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters of one rank for a set of modules."""

    rank: int = 16
    """Rank of each adapter."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ("attention", "shared_experts")
    """Groups (attention, shared_experts, experts, latent, mlp, head), module names (q_proj, self_attn.o_proj) or
    patterns over whole names (layers.[0-3].*)."""
    dropout: float = 0.0
    """Share of an adapter's inputs that a training step sets to zero; not of the adapters of routed experts and
    of kv_b_proj."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora: rank {self.rank} must be at least 1")
        if not 0 < self.alpha < inf:
            raise ValueError(f"lora: alpha {self.alpha} must be above 0 and finite")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora: dropout {self.dropout} must lie in [0, 1)")
        if not self.targets:
            raise ValueError("lora: targets are empty: nothing would be trained")


def adapter_spec(config: ModelConfig, lora: LoRAConfig) -> AdapterSpec:
    """The adapters that `lora` asks for in a model of this configuration.

    **Raises:** `ValueError` naming a target that fits no module, and what there is.
    """
    names = adaptable_names(config)
    chosen: set[str] = set()
    for target in lora.targets:
        patterns = GROUPS.get(target, (target, f"*.{target}"))
        found = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
        if not found:
            last = sorted({name.rpartition(".")[2] for name in names})
            raise ValueError(
                f"lora: target {target!r} fits no module of this model; groups are {', '.join(GROUPS)}, "
                f"modules {', '.join(last)}"
            )
        chosen |= found
    scale = lora.alpha / lora.rank
    return AdapterSpec(tuple((name, lora.rank, scale) for name in chosen))
