"""The demo model learns a toy task with adapters, routed experts among them."""

import json

import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.cli.bundled import DEMO
from kimi_jax.finetune import Batches, Documents, LoRAConfig, OptimizerConfig, Trainer, make_optimizer

KINGS = ("Azmon", "Baruth", "Cesil", "Dodan", "Eliam", "Gerar", "Hanoch", "Ithran")
STEPS = 60


@pytest.mark.usefixtures("optax_promotion")
def test_sixty_steps_halve_the_loss(tmp_path):
    lines = [
        f"And {king} reigned in {city} {len(king) + i} years."
        for i, (king, city) in enumerate(zip(KINGS, KINGS[::-1], strict=True))
    ]
    (tmp_path / "kings.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    model = kj.load_model(DEMO, dtype="float32")
    batches = Batches(Documents([tmp_path / "kings.jsonl"], Tokenizer.from_directory(DEMO)), rows=2, length=96)
    lora = LoRAConfig(rank=8, alpha=16.0, targets=("attention", "shared_experts", "experts"))
    trainer = Trainer(model, lora, make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=5), STEPS))
    losses = [float(trainer.step(next(batches), drift=False)["loss"]) for _ in range(STEPS)]
    assert np.mean(losses[-5:]) < losses[0] / 2
    assert all(np.isfinite(losses))
