"""Gradients of every adapter of tiny-k3, all nine layers, above the packed base.

    PYTHONPATH=tests python tests/bench/gradients.py            # float64
    PYTHONPATH=tests python tests/bench/gradients.py --meshes   # float32

In float64 by finite differences, and against autodiff through a dequantised base; in float32 three meshes with both
expert strategies against one device.

Prints the largest relative differences; exits with 1 where one is over its limit.
"""

import argparse
import dataclasses
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from finetune.batches import random_adapters, random_batch

import kimi_jax as kj
from kimi_jax.cli.bundled import BUNDLED
from kimi_jax.finetune.step import batch_loss
from kimi_jax.model.adapters import fetch_adapters, split_params
from kimi_jax.model.model import flatten, nest
from kimi_jax.ops.mxfp4 import dequantize

MESHES = {
    "data=8": {"data": 8},
    "data=2, tensor=4": {"data": 2, "tensor": 4},
    "data=2, context=2, tensor=2": {"data": 2, "context": 2, "tensor": 2},
}


@partial(jax.jit, static_argnums=0)
def loss(spec: Any, base: Any, adapters: Any, batch: Any) -> Any:
    """Of the batch."""
    return batch_loss(spec, base, adapters, batch)[0]


gradients = jax.jit(
    jax.grad(lambda adapters, spec, base, batch: batch_loss(spec, base, adapters, batch)[0]), static_argnums=1
)


def unpacked(spec: Any, base: Any) -> tuple[Any, Any]:
    """The same model with its experts as float64 matrices."""
    flat = dict(flatten(base))
    for name in [name for name in flat if name.endswith(".weight_packed")]:
        stem = name.removesuffix("_packed")
        flat[stem] = dequantize(flat.pop(name), flat.pop(f"{stem}_scale"), jnp.dtype(jnp.float64))
    config = dataclasses.replace(spec.config, moe=dataclasses.replace(spec.config.moe, packed=False))
    return dataclasses.replace(spec, config=config), nest(flat)


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, over the largest number."""
    return float(np.abs(np.asarray(found) - np.asarray(wanted)).max() / np.abs(np.asarray(wanted)).max())


def in_float64() -> bool:
    """Prints the worst adapter by finite differences and against the dequantised base."""
    jax.config.update("jax_enable_x64", True)
    model = random_adapters(kj.load_model(BUNDLED, dtype="float64"))
    base, adapters = split_params(model.params)
    adapters, batch = jax.tree.map(lambda x: x.astype(jnp.float64), adapters), random_batch(model.config)
    found = dict(flatten(gradients(adapters, model.spec, base, batch)))
    wanted = dict(flatten(gradients(adapters, *unpacked(model.spec, base), batch)))
    worst = max((relative(found[name], wanted[name]), name) for name in found)
    print(f"{len(found)} halves of adapters; dequantised base: {worst[0]:.1e} ({worst[1]})")
    rng, flat, eps, slopes = np.random.default_rng(0), dict(flatten(adapters)), 1e-7, []
    for name, gradient in found.items():
        direction = jnp.asarray(rng.normal(size=gradient.shape))
        ends = [loss(model.spec, base, nest(flat | {name: flat[name] + s * eps * direction}), batch) for s in (1, -1)]
        slope = float(jnp.sum(gradient * direction))
        slopes.append((abs(float(ends[0] - ends[1]) / (2 * eps) - slope) / max(abs(slope), 1e-3), name))
    print(f"finite differences along a random direction: {max(slopes)[0]:.1e} ({max(slopes)[1]})")
    return worst[0] < 1e-8 and max(slopes)[0] < 1e-4


def on_meshes() -> bool:
    """Prints the worst adapter for each mesh and strategy."""
    one = random_adapters(kj.load_model(BUNDLED, dtype="float32"))
    batch, good = random_batch(one.config, rows=8, length=16), True
    base, adapters = split_params(one.params)
    wanted = fetch_adapters(one.spec, gradients(adapters, one.spec, base, batch))
    for name, mesh in MESHES.items():
        for strategy in ("gather", "dispatch"):
            loaded = kj.load_model(BUNDLED, dtype="float32", mesh=kj.make_mesh(mesh), expert_strategy=strategy)
            model = random_adapters(loaded)
            base, adapters = split_params(model.params)
            found = fetch_adapters(model.spec, gradients(adapters, model.spec, base, batch))
            worst = max((relative(found[half], wanted[half]), half) for half in wanted)
            print(f"{name}, {strategy}: {worst[0]:.1e} ({worst[1]})", flush=True)
            good &= worst[0] < 1e-2
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", action="store_true")
    meshes = parser.parse_args().meshes
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(0 if (on_meshes() if meshes else in_float64()) else 1)
