"""The arrays of adapters: made, placed on a mesh, taken out of a model's parameters and put back."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from zlib import crc32

import jax
import numpy as np

from kimi_jax.config import ModelConfig
from kimi_jax.model.lora import AdapterSpec, is_adapter
from kimi_jax.model.model import Model, ModelSpec, Params, abstract_params, flatten, nest, placed_layout
from kimi_jax.parallel.distributed import fetch

Values = Callable[[str, tuple[slice, ...]], np.ndarray]
"""A part of half an adapter, by its published name and a slice of each axis, in float32."""


def split_params(params: Params) -> tuple[Params, Params]:
    """The parameters without adapters, and the adapters, as trees of their own."""
    leaves = dict(flatten(params))
    base = nest({name: x for name, x in leaves.items() if not is_adapter(name)})
    return base, nest({name: x for name, x in leaves.items() if is_adapter(name)})


def join_params(base: Params, adapters: Params) -> Params:
    """The inverse of `split_params`."""
    return nest(dict(flatten(base)) | dict(flatten(adapters)))


def with_adapters(model: Model, adapters: AdapterSpec, values: Values) -> Model:
    """`model` with adapters in place of those it may have; the weights are the same arrays."""
    spec = replace(model.spec, adapters=adapters)
    params = join_params(split_params(model.params)[0], place_adapters(spec, values))
    return replace(model, spec=spec, params=params)


def add_adapters(model: Model, adapters: AdapterSpec, seed: int) -> Model:
    """`model` with new adapters: A uniform in ±in^-1/2 (LoRA's usual start), B zero; the same numbers on every mesh."""
    return with_adapters(model, adapters, _initial_values(seed, half_shapes(model.config, adapters)))


def adapter_layout(spec: ModelSpec) -> dict[str, tuple[jax.ShapeDtypeStruct, tuple[str, ...]]]:
    """Every array of the adapters by its name in `params`: shape, dtype and sharding, and the halves it holds."""
    return {key: found for key, found in placed_layout(spec).items() if is_adapter(key)}


def place_adapters(spec: ModelSpec, values: Values) -> Params:
    """The adapters of `spec` on its devices; each reads the parts that it holds."""

    def place(like: jax.ShapeDtypeStruct, names: tuple[str, ...]) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            bounds = tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, like.shape, strict=True))
            if len(names) == 1:
                return values(names[0], bounds)
            return np.stack([values(name, bounds[1:]) for name in names[bounds[0]]])

        return jax.make_array_from_callback(like.shape, like.sharding, part, dtype=like.dtype)

    return nest({key: place(*found) for key, found in adapter_layout(spec).items()})


def _initial_values(seed: int, shapes: Mapping[str, tuple[int, ...]]) -> Values:
    def values(name: str, index: tuple[slice, ...]) -> np.ndarray:
        shape = shapes[name]
        sizes = tuple(s.stop - s.start for s in index)
        if name.endswith(".lora_B"):
            return np.zeros(sizes, np.float32)
        own = crc32(name.encode())
        bound = 1 / math.sqrt(shape[-1])
        if len(shape) == 2:
            return np.random.default_rng([seed, own]).uniform(-bound, bound, shape).astype(np.float32)[index]
        experts = [np.random.default_rng([seed, own, i]) for i in range(index[0].start, index[0].stop)]
        made = [rng.uniform(-bound, bound, shape[1:]).astype(np.float32)[index[1:]] for rng in experts]
        return np.stack(made) if made else np.zeros(sizes, np.float32)

    return values


def half_shapes(config: ModelConfig, adapters: AdapterSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the halves by their names, `layers.3.self_attn.q_proj.lora_A`; of routed experts stacked."""
    params = abstract_params(config, adapters=adapters)
    return {name: struct.shape for name, (struct, _) in params.items() if is_adapter(name)}


def fetch_adapters(spec: ModelSpec, adapters: Params) -> dict[str, np.ndarray]:
    """The halves by their published names, whole, on every host; all processes must call it."""
    leaves, found = dict(flatten(adapters)), {}
    for key, (_, names) in adapter_layout(spec).items():
        array = fetch(leaves[key])
        found.update({names[0]: array} if len(names) == 1 else dict(zip(names, array, strict=True)))
    return found
