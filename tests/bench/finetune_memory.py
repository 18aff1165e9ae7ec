"""What a training step of adapters holds, as compiled for this machine: with more experts, and with a higher rank.

    python tests/bench/finetune_memory.py

A synthetic model of K3's kinds of layers, experts packed. The base grows with the experts, the adapters with the rank.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from kimi_jax.config import ModelConfig
from kimi_jax.finetune.settings import DataConfig, FinetuneConfig
from kimi_jax.finetune.targets import LoRAConfig
from kimi_jax.model.model import ModelSpec
from kimi_jax.planning.compile import Step, lower_training

TARGETS = ("attention", "shared_experts")


def config(experts: int) -> ModelConfig:
    """Two layers of tiny-k3, KDA and MLA, wider and with many experts."""
    tiny = ModelConfig.from_file("tiny-k3")
    moe = dataclasses.replace(tiny.moe, num_experts=experts, expert_width=256)
    return dataclasses.replace(tiny, layer_kinds=("kda", "mla"), attn_res_block_size=1, moe=moe)


def main() -> None:
    """Compiles and prints a line for each size."""
    print("| experts | rank | base, MB | adapters and optimizer, MB | temporaries, MB |")
    print("| --- | --- | --- | --- | --- |")
    for experts, rank, targets in (
        (64, 8, TARGETS),
        (1024, 8, TARGETS),
        (64, 64, TARGETS),
        (64, 8, (*TARGETS, "experts")),
    ):
        settings = FinetuneConfig(lora=LoRAConfig(rank=rank, targets=targets), data=DataConfig(rows=1, length=256))
        spec = ModelSpec(config(experts), None, jnp.dtype(jnp.bfloat16))
        lowered = lower_training(spec, Step("train", 1, 256, 256, settings))
        base, state = lowered.args_info[0][0], lowered.args_info[0][1]
        sizes = [
            sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 1e6 for tree in (base, state)
        ]
        temporaries = lowered.compile().memory_analysis().temp_size_in_bytes / 1e6
        label = f"{rank}, experts too" if "experts" in targets else str(rank)
        print(f"| {experts} | {label} | {sizes[0]:.1f} | {sizes[1]:.2f} | {temporaries:.1f} |")


if __name__ == "__main__":
    main()
