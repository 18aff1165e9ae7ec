from functools import cache

import jax
import numpy as np
import pytest
from conftest import load_tiny

from kimi_jax.finetune.step import Tokens
from kimi_jax.finetune.targets import LoRAConfig, adapter_spec
from kimi_jax.model.adapters import with_adapters

ALL = ("attention", "shared_experts", "experts", "latent", "mlp", "head")


@pytest.fixture
def optax_promotion():
    """optax mixes dtypes and ranks: the test's own jitted steps are traced as optax wants it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@cache
def adapted_tiny(name: str, mesh: str = "one", dtype: str = "float32", loop: bool = False, rank: int = 2):
    """A tiny model with an adapter on every module that can have one, both halves random."""
    model = load_tiny(name, mesh, dtype, loop)
    spec = adapter_spec(model.config, LoRAConfig(rank, 2.0 * rank, ALL))

    def values(name, index):
        seed = [sum(map(ord, name)), len(name)]
        shape = SHAPES[spec, model.config][name]
        whole = np.random.default_rng(seed).normal(0, 0.3 if name.endswith("lora_B") else 0.1, shape)
        return whole.astype(np.float32)[index]

    from kimi_jax.checkpoint.adapters import half_shapes

    SHAPES[spec, model.config] = half_shapes(model.config, spec)
    return with_adapters(model, spec, values)


SHAPES: dict = {}


def random_batch(config, rows: int = 2, length: int = 12, seed: int = 0) -> Tokens:
    """Random documents, three a row where there is room; the last places of the last row are empty."""
    rng = np.random.default_rng(seed)
    lengths = np.full(rows, length, np.int32)
    lengths[-1] = length - 2
    starts = np.array([0, length // 3, length // 2])
    place = np.arange(length)
    first = np.broadcast_to(starts[np.searchsorted(starts, place, side="right") - 1], (rows, length)).astype(np.int32)
    real = place[None] < lengths[:, None]
    ids = rng.integers(0, config.vocab_size, (2, rows, length)).astype(np.int32)
    weights = (real & (rng.random((rows, length)) < 0.8)).astype(np.float32)
    return Tokens(*(jax.numpy.asarray(x) for x in (ids[0], ids[1], weights, first, lengths)))
