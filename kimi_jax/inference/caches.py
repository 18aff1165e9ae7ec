"""Making, copying, clearing, keeping and reading back caches."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool
from safetensors.numpy import save_file

from kimi_jax.checkpoint.safetensors_file import SafetensorsFile
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.inference.arguments import ArrayLike, check_batch, row_mask
from kimi_jax.model.cache import FP8, ROW_AXIS, Cache, cache_layout
from kimi_jax.model.model import Model, ModelSpec, flatten
from kimi_jax.parallel.distributed import fetch
from kimi_jax.parallel.sharding import array_sharding

_FORMAT = "kimi_jax cache 1"


class CacheError(ValueError):
    """A cache that does not belong to the model, or a cache file that cannot be used."""


def init_cache(model: Model, batch: int, max_len: int, latent_dtype: DTypeLike | None = None) -> Cache:
    """An empty cache, placed on the model's mesh.

    **Arguments:**

    - `batch`: rows; the mesh's `data` axis must divide it.
    - `max_len`: tokens that a row can hold, at most the model's `max_positions`.
    - `latent_dtype`: "fp8" keeps the latents of the MLA layers in float8_e4m3fn, half of bfloat16's bytes, rounded to
        four binary digits (`tests/bench/README.md` has the error). None: in the compute dtype.

    **Raises:** `MeshError` or `ValueError` with the numbers that do not fit.
    """
    check_batch(model, batch)
    latents = None if latent_dtype is None else jnp.dtype(FP8 if latent_dtype == "fp8" else latent_dtype)
    if latents not in (None, FP8, model.dtype):
        raise ValueError(f"latent_dtype {latents} is neither fp8 nor the compute dtype {model.dtype}")
    limit = model.config.max_positions
    if not 1 <= max_len <= limit:
        raise ValueError(f"max_len must lie between 1 and the model's {limit} positions, found {max_len}")
    layout, shardings = cache_placement(model.spec, batch, max_len, latents)
    make = jax.jit(partial(jax.tree.map, lambda s: jnp.zeros(s.shape, s.dtype), layout), out_shardings=shardings)
    words = np.asarray(model.identity, np.uint32)
    identity = jax.make_array_from_callback(words.shape, shardings.identity, lambda index: words[index])
    return replace(make(), identity=identity)


@lru_cache(maxsize=64)
def cache_placement(
    spec: ModelSpec, batch: int, max_len: int, latent_dtype: jnp.dtype | None = None
) -> tuple[Cache, Cache]:
    """A `Cache` of shapes and dtypes, and one of shardings."""
    layout, axes = cache_layout(spec.config, spec.dtype, batch, max_len, spec.loop, latent_dtype)

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
        field = path[-1].name
        rounds = (None,) * (len(leaf.shape) - len(axes[field]))
        return array_sharding(f"cache {field}", leaf.shape, rounds + axes[field], spec.mesh)

    return layout, jax.tree_util.tree_map_with_path(place, layout)


def constrain_cache(spec: ModelSpec, cache: Cache) -> Cache:
    """`cache`, inside a compiled function, with the shardings of `cache_placement`."""
    if spec.mesh is None:
        return cache
    _, shardings = cache_placement(spec, cache.batch, cache.max_len, _fp8_or_none(cache.latent_dtype))
    return jax.tree.map(jax.lax.with_sharding_constraint, cache, shardings)


def check_cache(model: Model, cache: Cache, batch: int) -> None:
    """Refuses a cache whose rows, shapes, dtypes or devices are not those of `model`."""
    if cache.batch != batch:
        raise ValueError(f"{batch} rows of tokens, but the cache has {cache.batch}")
    wanted, _ = cache_placement(model.spec, batch, cache.max_len, _fp8_or_none(cache.latent_dtype))
    if not _same_layout(cache, wanted):
        raise CacheError(
            "the cache was made for another model or dtype, or for one with another `loop`; make one with init_cache"
        )
    if cache.lengths.sharding.device_set != next(flatten(model.params))[1].sharding.device_set:
        raise CacheError("the cache lies on other devices than the model; make one with init_cache")


def copy_cache(cache: Cache) -> Cache:
    """The same contents in memory of their own: the copy survives when the original is donated."""
    return jax.tree.map(jnp.copy, cache)


def reset_rows(cache: Cache, rows: ArrayLike) -> Cache:
    """Empties the rows where `rows` (bool `[B]`) is True: nothing of their tokens stays. Donates `cache`."""
    return _reset(cache, row_mask("rows", rows, cache.batch))


@partial(jax.jit, donate_argnums=0)
def _reset(cache: Cache, rows: Bool[Array, " B"]) -> Cache:
    def clear(name: str, x: Array) -> Array:
        field = name.rpartition(".")[2]
        behind = x.ndim - 1 if field not in ROW_AXIS else -1 - ROW_AXIS[field]
        return jnp.where(rows.reshape((-1,) + (1,) * behind), jnp.zeros((), x.dtype), x)

    return replace(_map_named(clear, replace(cache, identity=None)), identity=cache.identity)


def save_cache(path: str | Path, cache: Cache) -> None:
    """Writes a cache to one safetensors file.

    Of the entries that grow with length only the filled part is written. The file carries the layout, the identity of
    the model that the cache was made for, and a checksum. In a job of several processes all call this and process 0
    writes.
    """
    filled = max(1, int(np.max(fetch(cache.lengths))))
    arrays = {name: fetch(x) for name, x in _named(_cut(cache, filled)).items()}
    metadata = {
        "format": _FORMAT,
        "identity": json.dumps([int(word) for word in fetch(cache.identity)]),
        "max_len": str(cache.max_len),
        "layout": json.dumps(_layout(cache)),
        "checksum": _checksum(arrays),
    }
    raw = {name: np.ascontiguousarray(x).reshape(-1).view(np.uint8) for name, x in arrays.items()}
    if jax.process_index() == 0:
        save_file(raw, path, metadata)


def load_cache(path: str | Path, model: Model) -> Cache:
    """Reads a cache that `save_cache` wrote, onto the model's mesh (which may be another than it was made on).

    **Raises:** `CacheError` where the file is damaged, or belongs to other weights, another configuration or dtype, or
    to a model loaded with another `loop`.
    """
    path = Path(path)
    try:
        file = SafetensorsFile(path)
        metadata = file.metadata
        if metadata.get("format") != _FORMAT:
            raise CacheError(f"{path} is not a cache of this version: format {metadata.get('format')!r}")
        identity, layout = json.loads(metadata["identity"]), json.loads(metadata["layout"])
        max_len = int(metadata["max_len"])
        (batch,) = layout["lengths"][0]
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise error if isinstance(error, CacheError) else CacheError(f"{path}: damaged: {error}") from None
    check_batch(model, batch)
    latents = {kind for name, (_, kind) in layout.items() if name.endswith("latents")}
    wanted, shardings = cache_placement(model.spec, batch, max_len, FP8 if latents == {FP8.name} else None)
    if layout != _layout(wanted):
        name = next(n for n in {**layout, **_layout(wanted)} if layout.get(n) != _layout(wanted).get(n))
        raise CacheError(
            f"{path}: another layout: {name} is {layout.get(name)}, this model wants {_layout(wanted).get(name)}"
        )
    if identity != list(model.identity):
        raise CacheError(f"{path}: the cache was made by a model with other weights")
    arrays = {}
    for name, struct in _named(wanted).items():
        flat = file.read(name).view(struct.dtype) if name in file.tensors else np.empty(0, struct.dtype)
        shape = struct.shape
        if _grows(name):
            *lead, _, width = shape
            shape = (*lead, flat.size // (math.prod(lead) * width), width)
        if flat.size != int(np.prod(shape)):
            raise CacheError(f"{path}: damaged: {name} has {flat.size} numbers, wanted shape {list(shape)}")
        arrays[name] = flat.reshape(shape)
    if _checksum(arrays) != metadata.get("checksum"):
        raise CacheError(f"{path}: damaged: the checksum of its contents is another")

    def place(name: str, struct: jax.ShapeDtypeStruct, sharding: Any) -> Array:
        part = arrays[name]
        widths = [(0, size - have) for size, have in zip(struct.shape, part.shape, strict=True)]
        whole = np.pad(part, widths)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return _map_named(place, wanted, shardings)


def _grows(name: str) -> bool:
    """Whether an array has an entry for each cached position, along its last axis but one."""
    return name.endswith(("latents", "index_keys"))


def _cut(cache: Cache, length: int) -> Cache:
    return _map_named(lambda name, x: x[..., :length, :] if _grows(name) else x, cache)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path)


def _named(cache: Cache) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(cache)[0]}


def _map_named(function: Callable[..., Any], cache: Cache, *others: Cache) -> Cache:
    return jax.tree_util.tree_map_with_path(lambda path, *x: function(_name(path), *x), cache, *others)


def _fp8_or_none(latent_dtype: jnp.dtype | None) -> jnp.dtype | None:
    return FP8 if latent_dtype == FP8 else None


def _same_layout(cache: Cache, wanted: Cache) -> bool:
    """As comparing `_layout`, but quick: this runs once a token."""
    try:
        same = jax.tree.map(lambda x, y: x.shape == y.shape and x.dtype == y.dtype, cache, wanted)
    except ValueError:  # other layers
        return False
    return all(jax.tree.leaves(same))


def _layout(cache: Cache) -> dict[str, list[Any]]:
    return {name: [list(x.shape), x.dtype.name] for name, x in _named(cache).items()}


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, x in sorted(arrays.items()):
        digest.update(f"{name} {x.shape} {x.dtype.name}".encode())
        digest.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
