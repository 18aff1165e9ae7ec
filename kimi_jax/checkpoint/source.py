"""A Hugging Face checkpoint, checked, whose parameters can be read by slices in our layout."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kimi_jax.checkpoint.check import check_tensors, resolve_indexer
from kimi_jax.checkpoint.manifest import MANIFEST
from kimi_jax.checkpoint.names import StoredTensor, is_vision
from kimi_jax.checkpoint.safetensors_file import CheckpointFiles
from kimi_jax.checkpoint.storage import CheckpointError, Folder, local_small_files, open_folder
from kimi_jax.config import ConfigError, ModelConfig, read_json_object
from kimi_jax.config_reader import token_ids
from kimi_jax.model.model import abstract_params
from kimi_jax.ops.mxfp4 import NAN_SCALE

Index = tuple[slice, ...]


class HuggingFaceSource:
    """The safetensors files of a folder, proved whole and right against their `config.json` by their headers.

    - `folder`, `files`: where they lie, and their headers.
    - `tensors`: full names of the stored tensors of each parameter, experts in order.
    - `config`: with nothing left open. `stop_ids`: ids that end a generation, from it and the generation configuration.
    - `vision_tensors`: how many tensors of a vision tower lie beside the parameters.
    """

    def __init__(self, directory: str | Path) -> None:
        """Reads configuration, index and headers.

        **Raises:** `ConfigError` for the configuration, `CheckpointError` for the files.
        """
        self.folder: Folder = open_folder(directory)
        if MANIFEST in self.folder.names():
            raise CheckpointError(
                f"{directory} holds a {MANIFEST}: a converted checkpoint is read from a local path; "
                "if it is none, move that file away"
            )
        with local_small_files(self.folder) as local:
            config = ModelConfig.from_file(local)
            self.stop_ids = read_stop_ids(config, local)
        self.files = CheckpointFiles(self.folder)
        self.config = resolve_indexer(config, {name: t.shape for name, t in self.files.tensors.items()})
        self.wanted: dict[str, StoredTensor] = check_tensors(self.config, self.files.tensors)
        self.vision_tensors = sum(is_vision(name) for name in self.files.tensors)
        self._last: tuple[str, slice, np.ndarray] = ("", slice(0), np.empty(0))
        self.tensors: dict[str, list[str]] = {}
        for name, tensor in self.wanted.items():
            assert tensor.param is not None
            self.tensors.setdefault(tensor.param, []).append(name)

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the tensors that belong to no parameter: the vision tower's, and shapes of packed weights."""
        return tuple(name for name in self.files.tensors if name not in self.wanted)

    def dtype(self, param: str) -> np.dtype:
        """The stored dtype of a parameter."""
        return self.files.numpy_dtype(self.tensors[param][0])

    def read(self, param: str, index: Index) -> np.ndarray:
        """A slice of a parameter in our layout.

        **Raises:** `CheckpointError` naming tensor and file for a scale byte that is NaN, an `A_log` whose padding is
        not zero, or a file that cannot be read.
        """
        shape, names = abstract_params(self.config)[param][0].shape, self.tensors[param]
        if self.wanted[names[0]].expert is not None:
            chosen = names[index[0]]
            part = np.empty((len(chosen), *shape[1:]), self.dtype(param))
            for name, place in zip(chosen, part, strict=True):
                self._check_scales(name, self.files.read(name, out=place))
        elif param.endswith(".A_log"):
            return self._unpadded(names[0], shape[0])[index]
        else:
            rows = self._rows(names[0], index[0])
            part = rows.reshape((len(rows), *shape[1:]))
        return part[(slice(None), *index[1:])]

    def _check_scales(self, name: str, part: np.ndarray) -> None:
        if name.endswith(".weight_scale") and np.any(part == NAN_SCALE):
            raise CheckpointError(
                f"tensor {name} in {self.files.tensors[name].path}: a scale byte is {NAN_SCALE}, which is NaN: the "
                "file is damaged, or was written by a failed quantisation"
            )

    def _rows(self, name: str, rows: slice) -> np.ndarray:
        # Devices that split other dimensions ask for the same rows one after the other.
        last = self._last
        if last[:2] != (name, rows):
            last = self._last = (name, rows, self.files.read(name, rows))
        return last[2]

    def _unpadded(self, name: str, heads: int) -> np.ndarray:
        stored = self.files.read(name).reshape(-1)
        bits = np.dtype(f"u{stored.dtype.itemsize}")
        padding = stored[heads:]
        if np.any(padding.view(np.uint8)):  # -0 would be lost on the way back
            raise CheckpointError(
                f"tensor {name} in {self.files.tensors[name].path}: {heads} numbers are one a head, "
                f"the {padding.size} behind them must be zero padding, found {padding[padding.view(bits) != 0][0]}"
            )
        return stored[:heads]


def read_stop_ids(config: ModelConfig, directory: Path) -> tuple[int, ...]:
    """Ids that end a generation: those of the configuration and of `generation_config.json` beside it."""
    return tuple(sorted({*config.stop_ids, *_generation_stop_ids(directory / "generation_config.json")}))


def _generation_stop_ids(path: Path) -> Iterator[int]:
    if not path.is_file():
        return
    raw = read_json_object(path)
    try:
        yield from token_ids(raw, "eos_token_id")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
