"""A converted checkpoint whose parameters can be read by slices."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from kimi_jax.checkpoint.array_store import ArrayStore
from kimi_jax.checkpoint.check import resolve_indexer
from kimi_jax.checkpoint.manifest import (
    MANIFEST,
    UNUSED,
    ArrayRecord,
    Record,
    digest,
    part_folder,
    read_manifest,
    read_record,
)
from kimi_jax.checkpoint.names import is_stacked, is_vision, stored_name
from kimi_jax.checkpoint.source import Index, read_stop_ids
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.config import ModelConfig, read_json_object
from kimi_jax.model.model import abstract_params

_READERS = 4
Original = Callable[[str, tuple[slice, ...]], np.ndarray]
"""Reads rows of an array of a part, by its dotted name, from where it came from."""


class ConvertedSource:
    """A finished converted checkpoint, its records proved right against its configuration.

    - `directory`: where it lies.
    - `records`: by part.
    - `config`, `stop_ids`, `vision_tensors`: see `HuggingFaceSource`, in whose place it can stand.
    """

    def __init__(self, directory: Path) -> None:
        """Reads manifest, records and configuration; no weights.

        **Raises:** `CheckpointError` where the conversion is not finished, a record is damaged, or an array is
        missing, extra, or of another shape or dtype than the configuration asks for.
        """
        self.directory = directory
        self.manifest = read_manifest(directory)
        if not self.manifest.complete:
            raise CheckpointError(
                f"{directory} is not a finished conversion: {self.manifest.done} of {len(self.manifest.parts)} parts "
                f"are done; run `kimi-jax convert SOURCE {directory}` again to resume it"
            )
        self.records = {part: read_record(directory, part, known) for part, known in self.manifest.parts.items()}
        self._part = {name: part for part, record in self.records.items() if part != UNUSED for name in record}
        self._stores = {part: ArrayStore(part_folder(directory, part)) for part in self.records}
        path = directory / "config.json"
        if not path.is_file() or read_json_object(path) != self.manifest.config:
            raise CheckpointError(
                f"{path} is not the configuration in {directory / MANIFEST}: put it back, or change both"
            )
        config = ModelConfig.from_file(directory)
        shapes = {stored_name(name): self.record(name).shape for name in self._part if not is_stacked(name)}
        self.config = resolve_indexer(config, shapes)
        self.stop_ids = read_stop_ids(config, directory)
        self.vision_tensors = sum(is_vision(name) for name in self.records.get(UNUSED, ()))
        self._check()

    def record(self, param: str) -> ArrayRecord:
        """What the records say of a parameter."""
        return self.records[self._part[param]][param]

    def _check(self) -> None:
        declared = abstract_params(self.config)
        for name in {**declared, **self._part}:
            where = f"array {name} in {self.directory}"
            if name not in self._part:
                raise CheckpointError(f"missing {where}: the configuration asks for it; convert the source again")
            if name not in declared:
                raise CheckpointError(f"extra {where}: the configuration has no such parameter")
            struct, found = declared[name][0], self.record(name)
            if found.shape != struct.shape:
                raise CheckpointError(f"{where}: shape {list(found.shape)}, wanted {list(struct.shape)}")
            wanted = ("uint8",) if struct.dtype == np.uint8 else ("bfloat16", "float32")
            if found.dtype not in wanted:
                raise CheckpointError(f"{where}: dtype {found.dtype}, wanted {' or '.join(wanted)}")

    def dtype(self, param: str) -> np.dtype:
        """See `HuggingFaceSource.dtype`."""
        return jax.numpy.dtype(self.record(param).dtype)

    def read(self, param: str, index: Index) -> np.ndarray:
        """See `HuggingFaceSource.read`; also of a tensor that no parameter uses, by its full name."""
        return self._stores[self._part.get(param, UNUSED)].read(param, index)


def check_part(directory: Path, part: str, record: Record, original: Original | None = None) -> Iterator[int]:
    """Compares every array of a part with its digests, and with `original` where given; yields bytes as they pass.

    **Raises:** `CheckpointError` naming the first tensor that differs, and the first element where `original` tells.
    """
    store = ArrayStore(part_folder(directory, part))

    def check(band: tuple[str, int]) -> int | str:
        name, number = band
        array = record[name]
        index = array.band(number)
        one_expert = is_stacked(name) and array.rows == 1
        where = f"{store.path}: tensor {_tensor(part, name, number if one_expert else None)}"
        rows = "" if one_expert else f", rows {index[0].start} to {index[0].stop}"
        try:
            found = store.read(name, index)
        except CheckpointError as error:
            return f"{where}{rows}: damaged: {error}"
        if original is not None:
            fault = _first_difference(found, original(name, index), index)
            if fault is not None:
                return f"{where}{fault}"
        if digest(found) != array.digests[number]:
            return f"{where}{rows}: the bytes differ from their digest: the files were damaged"
        return found.nbytes

    bands = [(name, number) for name, array in record.items() for number in range(len(array.digests))]
    with ThreadPoolExecutor(_READERS) as pool:
        for result in pool.map(check, bands):
            if isinstance(result, str):
                pool.shutdown(cancel_futures=True)
                raise CheckpointError(result)
            yield result


def _tensor(part: str, name: str, expert: int | None) -> str:
    """An array's name for people: that of the stored tensor, where it is one."""
    if part == UNUSED or (is_stacked(name) and expert is None):
        return name
    return stored_name(name, expert)


def _first_difference(found: np.ndarray, wanted: np.ndarray, index: tuple[slice, ...]) -> str | None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f": {found.dtype} {list(found.shape)}, its source has {wanted.dtype} {list(wanted.shape)}"
    bits = np.dtype(f"u{found.dtype.itemsize}")
    differs = found.view(bits) != np.ascontiguousarray(wanted).view(bits)
    if not np.any(differs):
        return None
    place = np.unravel_index(int(np.argmax(differs)), found.shape)
    element = [int(i) for i in place]
    value, source = found[place], wanted[place]
    element[0] += index[0].start
    return f": element {element} is {value}, its source has {source}"
