"""Sixty steps of adapters on the demo model: the loss on a toy task, by step.

python tests/bench/toy_task.py     # exits with 1 where the last losses are not below half of the first
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

import kimi_jax as kj
from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.cli.bundled import DEMO
from kimi_jax.finetune import Batches, Documents, LoRAConfig, OptimizerConfig, Trainer, make_optimizer

KINGS = ("Azmon", "Baruth", "Cesil", "Dodan", "Eliam", "Gerar", "Hanoch", "Ithran")
STEPS = 60


def main() -> None:
    """Trains and prints."""
    pairs = enumerate(zip(KINGS, KINGS[::-1], strict=True))
    lines = [f"And {king} reigned in {city} {len(king) + i} years." for i, (king, city) in pairs]
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "kings.jsonl"
        data.write_text("\n".join(json.dumps({"text": line}) for line in lines))
        batches = Batches(Documents([data], Tokenizer.from_directory(DEMO)), rows=2, length=96)
        lora = LoRAConfig(rank=8, alpha=16.0, targets=("attention", "shared_experts", "experts"))
        optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=5), STEPS)
        trainer = Trainer(kj.load_model(DEMO, dtype="float32"), lora, optimizer)
        losses = [float(trainer.step(next(batches), drift=False)["loss"]) for _ in range(STEPS)]
    for step in range(0, STEPS, 10):
        print(f"step {step + 1}: {losses[step]:.3f} nats a token")
    print(f"last five: {np.mean(losses[-5:]):.3f}")
    sys.exit(0 if np.mean(losses[-5:]) < losses[0] / 2 else 1)


if __name__ == "__main__":
    main()
