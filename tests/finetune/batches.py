"""Batches and adapters of random numbers, for gradients."""

import jax
import numpy as np

from kimi_jax.config import ModelConfig
from kimi_jax.finetune.step import Tokens
from kimi_jax.finetune.targets import LoRAConfig, adapter_spec
from kimi_jax.model.adapters import half_shapes, with_adapters
from kimi_jax.model.model import Model

ALL = ("attention", "shared_experts", "experts", "latent", "mlp", "head")


def random_adapters(model: Model, targets: tuple[str, ...] = ALL) -> Model:
    """The model with adapters of rank 2, both halves random; the same numbers on every mesh."""
    spec = adapter_spec(model.config, LoRAConfig(rank=2, alpha=4.0, targets=targets))
    shapes = half_shapes(model.config, spec)

    def values(name: str, index: tuple[slice, ...]) -> np.ndarray:
        rng = np.random.default_rng([sum(map(ord, name)), len(name)])
        return rng.normal(0, 0.3 if name.endswith("lora_B") else 0.1, shapes[name]).astype(np.float32)[index]

    return with_adapters(model, spec, values)


def random_batch(config: ModelConfig, rows: int = 2, length: int = 12, seed: int = 0) -> Tokens:
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
