"""Loading a Hugging Face checkpoint into a sharded model, each device receiving only its own part."""

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from kimi_jax.checkpoint.check import check_tensors, resolve_indexer
from kimi_jax.checkpoint.names import StoredTensor, is_vision
from kimi_jax.checkpoint.safetensors_file import CheckpointError, CheckpointFiles
from kimi_jax.config import ConfigError, ModelConfig, read_json_object
from kimi_jax.config_reader import token_ids
from kimi_jax.model.model import Model, ModelSpec, abstract_params, nest
from kimi_jax.ops.mxfp4 import NAN_SCALE
from kimi_jax.parallel.mesh import check_mesh
from kimi_jax.parallel.sharding import array_sharding

COMPUTE_DTYPES = ("bfloat16", "float32", "float64")

Progress = Callable[[int, int], None]
"""Called with the bytes placed so far and the bytes in all."""


def load_model(
    directory: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: DTypeLike = "bfloat16",
    progress: Progress | None = None,
) -> Model:
    """Loads a checkpoint onto the devices of `mesh`.

    **Arguments:**

    - `directory`: a Hugging Face directory: `config.json`, safetensors files, and their index where there are
        several.
    - `mesh`: from `make_mesh`; None for one device.
    - `dtype`: of the computation: bfloat16, float32, or float64 (which needs `jax_enable_x64`). The parameters keep
        the checkpoint's dtypes, packed experts stay packed.
    - `progress`: called after each parameter with bytes placed and bytes in all.

    **Raises:** `ConfigError` for the configuration, `MeshError` where the mesh does not divide the model,
    `CheckpointError` for the files: nothing is allocated before names, shapes, dtypes and file sizes are found right.
    """
    directory = Path(directory)
    check_mesh(mesh)
    compute = _compute_dtype(dtype)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    config = ModelConfig.from_file(directory)
    stop_ids = tuple(sorted({*config.stop_ids, *_generation_stop_ids(directory)}))
    files = CheckpointFiles(directory)
    config = resolve_indexer(config, files.tensors)
    wanted = check_tensors(config, files.tensors)
    by_param: dict[str, list[str]] = {}
    for name, tensor in wanted.items():
        assert tensor.param is not None
        by_param.setdefault(tensor.param, []).append(name)

    declared = abstract_params(config)
    shardings = {p: array_sharding(p, s.shape, axes, mesh) for p, (s, axes) in declared.items()}
    sizes = {p: sum(files.tensors[n].end - files.tensors[n].start for n in by_param[p]) for p in declared}
    placed, total = 0, sum(sizes.values())
    params: dict[str, Array] = {}
    for param, (struct, _) in declared.items():
        reader = _Reader(files, by_param[param], wanted, struct.shape)
        params[param] = jax.make_array_from_callback(struct.shape, shardings[param], reader)
        placed += sizes[param]
        if progress is not None:
            progress(placed, total)
    return Model(
        spec=ModelSpec(config, mesh, compute),
        params=nest(params),
        stop_ids=stop_ids,
        vision_tensors=sum(is_vision(name) for name in files.tensors),
    )


class _Reader:
    """Reads any slice of one parameter; devices that hold the same slice share one read."""

    def __init__(
        self,
        files: CheckpointFiles,
        names: list[str],
        wanted: Mapping[str, StoredTensor],
        shape: tuple[int, ...],
    ) -> None:
        self.files, self.names, self.shape = files, names, shape
        self.stacked = wanted[names[0]].expert is not None
        self.read: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def __call__(self, index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        key = tuple(s.indices(size)[:2] for s, size in zip(index, self.shape, strict=True))
        if key not in self.read:
            self.read[key] = self._stack(index) if self.stacked else self._one(self.names[0], index)
        return self.read[key]

    def _stack(self, index: tuple[slice, ...]) -> np.ndarray:
        names = self.names[index[0]]
        sizes = [len(range(*s.indices(size))) for s, size in zip(index, self.shape, strict=True)]
        out = np.empty(sizes, self.files.view(names[0]).dtype)
        for i, name in enumerate(names):
            out[i] = self._one(name, index[1:])
        return out

    def _one(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        tensor = self.files.tensors[name]
        stored = self.files.view(name)
        if name.endswith(".A_log"):
            stored = stored.reshape(-1)
            padding = stored[self.shape[0] :]
            if np.any(padding != 0):
                raise CheckpointError(
                    f"tensor {name} in {tensor.path}: {self.shape[0]} numbers are one a head, "
                    f"the {padding.size} behind them must be zero padding, found {padding[padding != 0][0]}"
                )
            stored = stored[: self.shape[0]]
        elif not self.stacked:
            stored = stored.reshape(self.shape)
        part = np.array(stored[index])
        if name.endswith(".weight_scale") and np.any(part == NAN_SCALE):
            raise CheckpointError(
                f"tensor {name} in {tensor.path}: a scale byte is {NAN_SCALE}, which is NaN: the file is damaged, "
                "or was written by a failed quantisation"
            )
        return part


def _compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    name = jnp.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in COMPUTE_DTYPES:
        raise ValueError(f"dtype {name!r} is not a compute dtype; use {', '.join(COMPUTE_DTYPES)}")
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError("dtype float64 needs jax.config.update('jax_enable_x64', True)")
    return jnp.dtype(name)


def _generation_stop_ids(directory: Path) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    if not path.is_file():
        return ()
    raw = read_json_object(path)
    try:
        return token_ids(raw, "eos_token_id")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
