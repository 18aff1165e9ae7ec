"""Adapters of routed experts as PEFT has them on transformers' own Kimi-Linear.

There the experts of a layer are two arrays, `mlp.experts.gate_up_proj` `[E, 2F, D]` (w1 over w3) and
`mlp.experts.down_proj` `[E, D, F]`. PEFT adapts such arrays where `target_parameters` names them. It puts the adapters
of all experts into one pair, `A` `[E·r, in]`, of which expert e has the rows e·r …, and `B` `[out, r·E]`, of which it
has the columns e, E + e …; and of single experts' w1 and w3, both of rank r, it makes one pair of rank 2r.
"""

import re
from collections.abc import Iterator

import numpy as np

from kimi_jax.config import ModelConfig
from kimi_jax.model.lora import AdapterSpec

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_PATH = re.compile(r"(?P<before>(?:.*\.)?)(?P<layer>layers\.\d+\.)mlp\.experts(?:\.base_layer)?")


def fused_targets(spec: AdapterSpec) -> Iterator[tuple[str, int, float]]:
    """Name, rank and scale of each array that PEFT has to adapt for the routed experts of `spec`.

    A layer whose w1 and w3 do not both have adapters, of one rank and scale, has no place for them there.
    """
    for name, rank, scale in spec.modules:
        if name.endswith(".experts.w2"):
            yield name.replace("block_sparse_moe.experts.w2", DOWN), rank, scale
        elif name.endswith(".experts.w1") and spec.by_name.get(name[:-1] + "3") == (rank, scale):
            yield name.replace("block_sparse_moe.experts.w1", GATE_UP), 2 * rank, scale


def fused_layer(path: str) -> tuple[str, str] | None:
    """What stands before `layers` in the path of such a pair, and the layer, `layers.3.`; None for another path."""
    found = _PATH.fullmatch(path)
    return None if found is None else (found["before"], found["layer"])


def fused_kind(config: ModelConfig, a: tuple[int, ...], b: tuple[int, ...]) -> str | None:
    """Which of the two arrays a pair of these shapes belongs to."""
    width, inner = config.expert_input, config.moe.expert_width
    if len(a) != 2 or len(b) != 2:
        return None
    return {(width, 2 * inner): GATE_UP, (inner, width): DOWN}.get((a[1], b[0]))


def split_pair(config: ModelConfig, kind: str, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Stacked halves `w1.lora_A` `[E, r, in]`, `w1.lora_B` `[E, out, r]` and so on of a fused pair."""
    experts, inner = config.moe.num_experts, config.moe.expert_width
    a = a.reshape((experts, -1, a.shape[1]))
    b = np.ascontiguousarray(b.reshape((b.shape[0], -1, experts)).transpose(2, 0, 1))
    if kind == DOWN:
        return {"w2.lora_A": a, "w2.lora_B": b}
    return {"w1.lora_A": a, "w3.lora_A": a, "w1.lora_B": b[:, :inner], "w3.lora_B": b[:, inner:]}
