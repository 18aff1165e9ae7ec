import base64
import json
from dataclasses import dataclass

import pytest
from conftest import load_tiny
from two_layers import two_layers

from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.finetune import Batches, Documents, OptimizerConfig, Trainer, make_optimizer
from kimi_jax.finetune.settings import FinetuneConfig, RunConfig
from kimi_jax.finetune.targets import LoRAConfig


@dataclass(frozen=True)
class TinyRun:
    """What a run on two layers of tiny-k3 takes; bytes are tokens."""

    config: FinetuneConfig
    documents: Documents

    def trainer(self) -> Trainer:
        model = two_layers(load_tiny("tiny-k3"))
        return Trainer(model, self.config.lora, OPTIMIZER, seed=3)

    def batches(self) -> Batches:
        return Batches(self.documents, rows=2, length=24, seed=1)

    def held_out(self) -> Batches:
        return Batches(self.documents, rows=2, length=24, shuffle=False, epochs=1)


OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=1), 7)


@pytest.fixture
def tiny_run(tmp_path) -> TinyRun:
    """A run of seven steps, saved after 4 and 7."""
    ranks = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (tmp_path / "tiktoken.model").write_text(ranks)
    lines = [json.dumps({"text": f"{word} and {word} again"}) for word in ("one", "two", "three", "four", "five")]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    tokenizer = Tokenizer.from_directory(tmp_path, expected_vocab_size=512)
    run = RunConfig(steps=7, evaluate_every=4, save_every=4)
    lora = LoRAConfig(rank=2, alpha=4.0, targets=("attention", "experts"))
    return TinyRun(FinetuneConfig(run=run, lora=lora), Documents([tmp_path / "train.jsonl"], tokenizer))
