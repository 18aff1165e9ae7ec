"""Gradients of adapters through the packed base, by finite differences; on meshes in `bench/gradients.py`."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_tiny
from finetune.batches import random_adapters, random_batch
from two_layers import two_layers

from kimi_jax.finetune.step import batch_loss
from kimi_jax.model.adapters import split_params
from kimi_jax.model.model import flatten, nest


@partial(jax.jit, static_argnums=0)
def loss(spec, base, adapters, batch):
    return batch_loss(spec, base, adapters, batch)[0]


@partial(jax.jit, static_argnums=0)
def gradients(spec, base, adapters, batch):
    return jax.grad(lambda x: batch_loss(spec, base, x, batch)[0])(adapters)


@cache
def adapted(mesh="one", dtype="float32"):
    """Two layers of tiny-k3 with an adapter on every module that can have one."""
    return random_adapters(two_layers(load_tiny("tiny-k3", mesh, dtype)))


def test_every_adapter_in_float64():
    """Against finite differences along a random direction of each adapter."""
    with jax.enable_x64(True):
        model = adapted(dtype="float64")
        batch = random_batch(model.config)
        base, adapters = split_params(model.params)
        adapters = jax.tree.map(lambda x: x.astype(jnp.float64), adapters)
        found = dict(flatten(gradients(model.spec, base, adapters, batch)))
        assert len(found) == 2 * len(model.spec.adapters.modules) > 50
        rng, flat, eps = np.random.default_rng(0), dict(flatten(adapters)), 1e-7
        for module, *_ in model.spec.adapters.modules:
            halves = [f"{module}.lora_A", f"{module}.lora_B"]
            assert all(np.abs(found[half]).max() > 0 for half in halves), module
            way = {half: jnp.asarray(rng.normal(size=found[half].shape)) for half in halves}
            ends = [
                float(
                    loss(
                        model.spec,
                        base,
                        nest(flat | {half: flat[half] + s * eps * way[half] for half in halves}),
                        batch,
                    )
                )
                for s in (1, -1)
            ]
            slope = float(sum(jnp.sum(found[half] * way[half]) for half in halves))
            assert (ends[0] - ends[1]) / (2 * eps) == pytest.approx(slope, rel=1e-5, abs=1e-6), module
