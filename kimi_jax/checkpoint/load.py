"""Loading a checkpoint, Hugging Face's or a converted one, into a sharded model: a device receives only its part."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from kimi_jax.checkpoint.adapters import read_adapters
from kimi_jax.checkpoint.converted import ConvertedSource
from kimi_jax.checkpoint.manifest import is_converted
from kimi_jax.checkpoint.source import HuggingFaceSource
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.config import ModelConfig
from kimi_jax.model.adapters import with_adapters
from kimi_jax.model.model import Model, ModelSpec, Params, nest, param_layout
from kimi_jax.ops.rounding import DENSE_WEIGHTS, round_channels
from kimi_jax.parallel.expert_parallel import STRATEGIES
from kimi_jax.parallel.mesh import check_mesh
from kimi_jax.parallel.sharding import array_sharding

COMPUTE_DTYPES = ("bfloat16", "float32", "float64")

ParamSource = HuggingFaceSource | ConvertedSource
Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes in all."""


def load_model(
    directory: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: DTypeLike = "bfloat16",
    layers: Sequence[int] | None = None,
    expert_strategy: str = "auto",
    loop: bool | None = None,
    dense_weights: str = "bf16",
    adapters: str | Path | None = None,
    progress: Progress | None = None,
) -> Model:
    """Loads a checkpoint onto the devices of `mesh`; on several hosts each reads only what its devices hold.

    **Arguments:**

    - `directory`: a Hugging Face directory (`config.json`, safetensors files, and their index where there are
        several) or its URL, or what `kimi-jax convert` made of one.
    - `mesh`: from `make_mesh`; None for one device. It need not be the one a checkpoint was made on.
    - `dtype`: of the computation: bfloat16, float32, or float64 (which needs `jax_enable_x64`). The parameters keep
        the checkpoint's dtypes, packed experts stay packed.
    - `layers`: load only these decoder layers, from 0, besides embedding, norm and head: for looking at some of a
        model that does not fit. `model.layers[i]` of the others has shapes and no numbers.
    - `expert_strategy`: how expert parallelism moves tokens: "gather", "dispatch", or "auto" by the bytes that each
        moves (see `kimi_jax.parallel.expert_parallel`).
    - `loop`: stack the layers that repeat and run them as a loop (`kimi_jax.model.segments`): minutes less of compiling
        for K3. None: on accelerators, unless `layers` are chosen. On CPU a loop copies every weight it uses.
    - `dense_weights`: "int8" or "fp8" (float8_e4m3fn) rounds the projections of attention and of the dense and shared
        MLPs, and the head, to eight bits with one float32 scale an output channel, half of bfloat16's bytes. As the
        checkpoint has them stay embedding, `kv_b_proj`, indexer, router, and the projections around the experts. "bf16"
        rounds nothing. Devices round one array after the other.
    - `adapters`: a directory of low-rank adapters in PEFT's format, or of a run of `kimi-jax finetune`.
    - `progress`: called after each array with the bytes read and the bytes in all.

    **Raises:** `ConfigError` for the configuration, `MeshError` where the mesh does not divide the model,
    `CheckpointError` for the files: nothing is allocated before names, shapes, dtypes and file sizes are found right,
    and a conversion that is not finished is refused; and naming the parameter where what is rounded holds NaN or
    infinity. `ValueError` for `dtype`, `dense_weights`, `expert_strategy` and `layers`.
    """
    if loop and layers is not None:
        raise ValueError("loop is for whole models: leave it out when choosing layers")
    loop = False if layers is not None else loop
    source, spec = _open(directory, mesh, dtype, expert_strategy, loop, dense_weights)
    added = None if adapters is None else read_adapters(adapters, spec.config)
    published = param_layout(spec.config, spec.loop, "bf16", None)
    declared = param_layout(spec.config, spec.loop, dense_weights, None)
    shardings = {key: array_sharding(key, s.shape, axes, mesh) for key, (s, axes, _) in declared.items()}
    present = _check_layers(layers, source.config)
    wanted = {key: names for key, (_, _, names) in published.items() if _is_wanted(key, present)}
    for names in wanted.values():
        _check_same_dtype(source, names)
    sizes = {key: math.prod(declared[key][0].shape) * source.dtype(names[0]).itemsize for key, names in wanted.items()}
    placed, total = 0, sum(sizes.values())
    params: dict[str, Array | jax.ShapeDtypeStruct] = {key: struct for key, (struct, _, _) in declared.items()}
    for key, names in wanted.items():
        array = _place(source, names, declared[key][0].shape, shardings[key])
        if declared[key][0].dtype != published[key][0].dtype:
            scale = f"{key}_scale"
            places = shardings[key], shardings[scale], array_sharding("faults", (), (), mesh)
            array, params[scale] = _round(key, array, dense_weights, places)
        params[key] = array
        placed += sizes[key]
        if progress is not None:
            progress(placed, total)
    model = Model(
        spec=spec,
        params=nest(params),
        stop_ids=source.stop_ids,
        vision_tensors=source.vision_tensors,
        absent_layers=tuple(layer for layer in range(source.config.num_layers) if layer not in present),
    )
    if added is None:
        return model
    adapter_spec, arrays = added
    return with_adapters(model, adapter_spec, lambda name, index: arrays[name][index])


def declared_model(
    directory: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: DTypeLike = "bfloat16",
    expert_strategy: str = "auto",
    loop: bool | None = None,
    dense_weights: str = "bf16",
    adapters: str | Path | None = None,
) -> tuple[ModelSpec, Params]:
    """What `load_model` would load: its `spec`, and parameters of which shapes, dtypes and shardings are known."""
    source, spec = _open(directory, mesh, dtype, expert_strategy, loop, dense_weights)
    if adapters is not None:
        spec = replace(spec, adapters=read_adapters(adapters, spec.config)[0])
    published = param_layout(spec.config, spec.loop, "bf16", None)
    for _, _, names in published.values():
        _check_same_dtype(source, names)
    params = {}
    for key, (x, axes, names) in param_layout(spec.config, spec.loop, dense_weights, spec.adapters).items():
        kept = key in published and x.dtype == published[key][0].dtype
        stored = source.dtype(names[0]) if kept else x.dtype
        params[key] = jax.ShapeDtypeStruct(x.shape, stored, sharding=array_sharding(key, x.shape, axes, mesh))
    return spec, nest(params)


def _open(
    directory: str | Path,
    mesh: Mesh | None,
    dtype: DTypeLike,
    expert_strategy: str,
    loop: bool | None,
    dense_weights: str,
) -> tuple[ParamSource, ModelSpec]:
    check_mesh(mesh)
    compute = _compute_dtype(dtype)
    if expert_strategy not in STRATEGIES:
        raise ValueError(f"expert_strategy {expert_strategy!r} is none of {', '.join(STRATEGIES)}")
    if dense_weights not in DENSE_WEIGHTS:
        raise ValueError(f"dense_weights {dense_weights!r} is none of {', '.join(DENSE_WEIGHTS)}")
    source = open_source(directory)
    if loop is None:
        devices = jax.devices() if mesh is None else mesh.devices.flat
        loop = devices[0].platform != "cpu"
    return source, ModelSpec(source.config, mesh, compute, expert_strategy, loop, dense_weights)


def open_source(directory: str | Path) -> ParamSource:
    """The checkpoint at a path or URL, checked as far as its headers or records tell."""
    if "://" not in str(directory) and is_converted(Path(directory)):
        return ConvertedSource(Path(directory))
    return HuggingFaceSource(directory)


def _place(
    source: ParamSource, names: tuple[str, ...], shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> Array:
    """A parameter, or a stack of several, on its devices; those that hold the same slice share one read."""
    read: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        if bounds not in read:
            own = tuple(slice(*b) for b in bounds)
            read[bounds] = source.read(names[0], own) if len(names) == 1 else stack(names[own[0]], own[1:])
        return read[bounds]

    def stack(layers: tuple[str, ...], index: tuple[slice, ...]) -> np.ndarray:
        out = np.empty((len(layers), *(i.stop - i.start for i in index)), source.dtype(layers[0]))
        for place, name in zip(out, layers, strict=True):
            place[...] = source.read(name, index)
        return out

    return jax.make_array_from_callback(shape, sharding, part, dtype=source.dtype(names[0]))


def _round(key: str, weight: Array, kind: str, places: tuple[jax.sharding.Sharding, ...]) -> tuple[Array, Array]:
    """A parameter in eight bits, and its scales; the array that it was is given up before the next one is read."""
    rounded, scale, faults = _rounding(kind, places)(weight)
    if int(faults):
        raise CheckpointError(
            f"parameter {key}: NaN or infinity in {int(faults)} of its {scale.size} output channels, which cannot be "
            f"rounded to {kind}; dense_weights='bf16' loads it as it is"
        )
    weight.delete()
    return rounded, scale


@cache
def _rounding(kind: str, places: tuple[jax.sharding.Sharding, ...]) -> Callable[[Array], Any]:
    """The jitted `round_channels`, and the number of channels whose scale is not finite."""

    def rounded(weight: Array) -> tuple[Array, Array, Array]:
        values, scale = round_channels(weight, kind)
        return values, scale, jnp.sum(~jnp.isfinite(scale), dtype=jnp.int32)

    return jax.jit(rounded, out_shardings=places)


def _check_same_dtype(source: ParamSource, names: tuple[str, ...]) -> None:
    """A stack has one dtype: another would be cast in silence."""
    for name in names:
        if source.dtype(name) != source.dtype(names[0]):
            raise CheckpointError(
                f"tensor {name} is {source.dtype(name)} and {names[0]} {source.dtype(names[0])}: layers of different "
                "dtypes cannot be stacked; load with loop=False"
            )


def _check_layers(layers: Sequence[int] | None, config: ModelConfig) -> frozenset[int]:
    chosen = range(config.num_layers) if layers is None else layers
    for layer in chosen:
        if not 0 <= layer < config.num_layers:
            raise ValueError(f"layers: {layer} is none of the model's, 0 to {config.num_layers - 1}")
    return frozenset(chosen)


def _is_wanted(key: str, layers: frozenset[int]) -> bool:
    head, _, tail = key.partition(".")
    layer = tail.partition(".")[0]
    return head != "layers" or not layer.isdecimal() or int(layer) in layers


def _compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    name = jnp.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in COMPUTE_DTYPES:
        raise ValueError(f"dtype {name!r} is not a compute dtype; use {', '.join(COMPUTE_DTYPES)}")
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError("dtype float64 needs jax.config.update('jax_enable_x64', True)")
    return jnp.dtype(name)
