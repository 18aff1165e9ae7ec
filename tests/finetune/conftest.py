import base64
import json
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np
import pytest
from conftest import load_tiny
from two_layers import two_layers

from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.checkpoint.adapters import half_shapes
from kimi_jax.finetune import Batches, Documents, OptimizerConfig, Trainer, make_optimizer
from kimi_jax.finetune.settings import FinetuneConfig, RunConfig
from kimi_jax.finetune.step import Tokens
from kimi_jax.finetune.targets import LoRAConfig, adapter_spec
from kimi_jax.model.adapters import with_adapters
from kimi_jax.model.model import Model

ALL = ("attention", "shared_experts", "experts", "latent", "mlp", "head")


@cache
def adapted_tiny(mesh: str = "one", dtype: str = "float32") -> Model:
    """Two layers of tiny-k3 with an adapter on every module that can have one, both halves random."""
    model = two_layers(load_tiny("tiny-k3", mesh, dtype))
    spec = adapter_spec(model.config, LoRAConfig(rank=2, alpha=4.0, targets=ALL))
    shapes = half_shapes(model.config, spec)

    def values(name, index):
        rng = np.random.default_rng([sum(map(ord, name)), len(name)])
        return rng.normal(0, 0.3 if name.endswith("lora_B") else 0.1, shapes[name]).astype(np.float32)[index]

    return with_adapters(model, spec, values)


def random_batch(config, rows: int = 2, length: int = 12, seed: int = 0) -> Tokens:
    """Random documents, three a row; the last places of the last row are empty, and some targets do not count."""
    rng = np.random.default_rng(seed)
    lengths = np.full(rows, length, np.int32)
    lengths[-1] = length - 2
    starts, place = np.array([0, length // 3, length // 2]), np.arange(length)
    first = np.broadcast_to(starts[np.searchsorted(starts, place, side="right") - 1], (rows, length)).astype(np.int32)
    real = place[None] < lengths[:, None]
    ids = rng.integers(0, config.vocab_size, (2, rows, length)).astype(np.int32)
    weights = (real & (rng.random((rows, length)) < 0.8)).astype(np.float32)
    return Tokens(*map(jax.numpy.asarray, (ids[0], ids[1], weights, first, lengths)))


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
