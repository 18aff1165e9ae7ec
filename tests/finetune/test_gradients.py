"""Gradients of adapters through the packed base: finite differences, a dequantised base, meshes, loops."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_tiny
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
    packed = [name for name in flat if name.endswith(".weight_packed")]
    for name in packed:
        stem = name.removesuffix("_packed")
        flat[stem] = dequantize(flat.pop(name), flat.pop(f"{stem}_scale"), jnp.float64)
    config = dataclasses.replace(spec.config, moe=dataclasses.replace(spec.config.moe, packed=False))
    return dataclasses.replace(spec, config=config), nest(flat)


@pytest.mark.usefixtures("optimized")
def test_every_adapter_in_float64():
    """Against finite differences along a random direction of each half, and against a dequantised base."""
    with jax.enable_x64(True):
        model = adapted_tiny("tiny-k3", dtype="float64")
        batch = random_batch(model.config)
        base, adapters = split_params(model.params)
        adapters = jax.tree.map(lambda x: x.astype(jnp.float64), adapters)
        found = dict(flatten(gradients(model.spec, base, adapters, batch)))
        plain_spec, plain = unpacked(model.spec, base)
        wanted = dict(flatten(gradients(plain_spec, plain, adapters, batch)))
        assert len(found) == 2 * len(model.spec.adapters.modules)
        rng, flat, eps = np.random.default_rng(0), dict(flatten(adapters)), 1e-5
        for name, gradient in found.items():
            np.testing.assert_allclose(gradient, wanted[name], rtol=1e-9, atol=1e-12 * np.abs(wanted[name]).max())
            assert np.abs(gradient).max() > 0, name
            direction = jnp.asarray(rng.normal(size=gradient.shape))
            ends = [
                float(loss(model.spec, base, nest(flat | {name: flat[name] + side * eps * direction}), batch))
                for side in (1, -1)
            ]
            slope = float(jnp.sum(gradient * direction))
            assert (ends[0] - ends[1]) / (2 * eps) == pytest.approx(slope, rel=1e-6, abs=1e-7), name


CASES = [("data8", "gather", False), ("data8", "dispatch", False), ("data2-tensor2", "dispatch", True)]


@pytest.mark.parametrize(("mesh", "strategy", "loop"), CASES)
def test_meshes_strategies_and_loops_agree(mesh, strategy, loop):
    one = adapted_tiny("tiny-k3")
    batch = random_batch(one.config, rows=8)
    wanted = fetch_adapters(one.spec, gradients(one.spec, *split_params(one.params), batch))
    model = adapted_tiny("tiny-k3", mesh, loop=loop)
    spec = dataclasses.replace(model.spec, expert_strategy=strategy)
    found = fetch_adapters(spec, gradients(spec, *split_params(model.params), batch))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-4 * np.abs(value).max(), err_msg=name)


def test_first_logits_are_those_of_the_base():
    from kimi_jax.finetune.targets import LoRAConfig, adapter_spec
    from kimi_jax.inference.functions import forward
    from kimi_jax.model.adapters import add_adapters

    model = load_tiny("tiny-k3")
    adapted = add_adapters(model, adapter_spec(model.config, LoRAConfig(4)), seed=1)
    tokens = np.arange(10)[None]
    np.testing.assert_array_equal(forward(adapted, tokens), forward(model, tokens))
