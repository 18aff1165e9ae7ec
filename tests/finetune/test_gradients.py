"""Gradients of adapters through the packed base: finite differences, a dequantised base, a mesh."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finetune.conftest import adapted_tiny, random_batch

from kimi_jax.finetune.step import batch_loss
from kimi_jax.model.adapters import fetch_adapters, split_params
from kimi_jax.model.model import flatten, nest
from kimi_jax.ops.mxfp4 import dequantize


@partial(jax.jit, static_argnums=0)
def loss(spec, base, adapters, batch):
    return batch_loss(spec, base, adapters, batch)[0]


@partial(jax.jit, static_argnums=0)
def gradients(spec, base, adapters, batch):
    return jax.grad(lambda x: batch_loss(spec, base, x, batch)[0])(adapters)


def unpacked(spec, base):
    """The same model with its experts as float64 matrices."""
    flat = dict(flatten(base))
    for name in [name for name in flat if name.endswith(".weight_packed")]:
        stem = name.removesuffix("_packed")
        flat[stem] = dequantize(flat.pop(name), flat.pop(f"{stem}_scale"), jnp.dtype(jnp.float64))
    config = dataclasses.replace(spec.config, moe=dataclasses.replace(spec.config.moe, packed=False))
    return dataclasses.replace(spec, config=config), nest(flat)


def test_every_adapter_in_float64():
    """Against finite differences along a random direction of each half, and against a dequantised base."""
    with jax.enable_x64(True):
        model = adapted_tiny(dtype="float64")
        batch = random_batch(model.config)
        base, adapters = split_params(model.params)
        adapters = jax.tree.map(lambda x: x.astype(jnp.float64), adapters)
        found = dict(flatten(gradients(model.spec, base, adapters, batch)))
        plain_spec, plain = unpacked(model.spec, base)
        wanted = dict(flatten(gradients(plain_spec, plain, adapters, batch)))
        assert len(found) == 2 * len(model.spec.adapters.modules) > 50
        rng, flat, eps = np.random.default_rng(0), dict(flatten(adapters)), 1e-5
        for name, gradient in found.items():
            np.testing.assert_allclose(gradient, wanted[name], rtol=1e-8, atol=1e-10 * np.abs(wanted[name]).max())
            assert np.abs(gradient).max() > 0, name
            direction = jnp.asarray(rng.normal(size=gradient.shape))
            ends = [
                float(loss(model.spec, base, nest(flat | {name: flat[name] + side * eps * direction}), batch))
                for side in (1, -1)
            ]
            slope = float(jnp.sum(gradient * direction))
            assert (ends[0] - ends[1]) / (2 * eps) == pytest.approx(slope, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("strategy", ["gather", "dispatch"])
def test_a_mesh_gives_the_same_gradients(strategy):
    one = adapted_tiny()
    batch = random_batch(one.config, rows=4)
    wanted = fetch_adapters(one.spec, gradients(one.spec, *split_params(one.params), batch))
    model = adapted_tiny("data2-tensor2")
    spec = dataclasses.replace(model.spec, expert_strategy=strategy)
    found = fetch_adapters(spec, gradients(spec, *split_params(model.params), batch))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-4 * np.abs(value).max(), err_msg=name)
