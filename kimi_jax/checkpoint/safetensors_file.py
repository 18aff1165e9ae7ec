"""Reading safetensors files by slices, after proving from the header that the file is whole.

The library's reader maps whole tensors and, for some dtypes, refuses NumPy; a pod needs the part that one
device holds. Nothing in a file is ever executed or unpickled.
"""

import json
import math
import mmap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_MAX_HEADER = 100_000_000  # the format's own limit


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the tensor, the file and what was wanted."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: its header entry, with `start` and `end` in bytes from the file's beginning."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open safetensors file whose header has been checked against its size.

    - `path`: the file.
    - `tensors`: header entries by name.
    - `metadata`: the header's free-form strings.
    """

    def __init__(self, path: Path) -> None:
        """Reads and checks the header.

        **Raises:** `CheckpointError` naming file and tensor where the header is damaged, a tensor is listed twice,
        tensors overlap or leave gaps, or the file is shorter or longer than its header says.
        """
        self.path = path
        self.size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if self.size < 8 or 8 + length > self.size or length > _MAX_HEADER:
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file: {self.size} bytes, "
                    f"of which the header should take {8 + length}"
                )
            raw = file.read(length)
        try:
            header = json.loads(raw, object_pairs_hook=partial(_unrepeated, path))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: the header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise CheckpointError(f"{path}: the header must be a JSON object, found {type(header).__name__}")
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        base = 8 + length
        self.tensors = {name: self._entry(name, entry, base) for name, entry in header.items()}
        self._check_layout(base)

    def _entry(self, name: str, entry: Any, base: int) -> TensorInfo:
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
            start, end = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise CheckpointError(f"{self.path}: tensor {name}: damaged header entry {entry!r}") from None
        if dtype not in _DTYPES:
            raise CheckpointError(f"{self.path}: tensor {name}: unknown dtype {dtype!r}")
        wanted = math.prod(shape) * _DTYPES[dtype].itemsize
        if end - start != wanted or start < 0 or min(shape, default=0) < 0:
            raise CheckpointError(
                f"{self.path}: tensor {name}: {dtype} {list(shape)} takes {wanted} bytes, "
                f"the header gives it {end - start}"
            )
        return TensorInfo(name, self.path, dtype, shape, base + start, base + end)

    def _check_layout(self, base: int) -> None:
        place, last = base, None
        for tensor in sorted(self.tensors.values(), key=lambda t: (t.start, t.end)):
            if tensor.start != place:
                fault = "overlaps" if tensor.start < place else "leaves a gap behind"
                before = "the header" if last is None else f"the tensor before it ({last})"
                raise CheckpointError(f"{self.path}: tensor {tensor.name} {fault} {before}")
            if tensor.end > self.size:
                raise CheckpointError(
                    f"{self.path}: truncated: tensor {tensor.name} ends at byte {tensor.end}, "
                    f"the file has {self.size}; download the file again"
                )
            place, last = tensor.end, tensor.name
        if place != self.size:
            raise CheckpointError(
                f"{self.path}: {self.size - place} bytes too long: its last tensor ({last}) ends at byte {place}, "
                f"the file has {self.size}; download the file again"
            )

    @cached_property
    def _bytes(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, name: str) -> np.ndarray:
        """The tensor as a read-only array over the mapped file: what is not touched is not read."""
        tensor = self.tensors[name]
        dtype = _DTYPES[tensor.dtype]
        if tensor.start == tensor.end:
            return np.empty(tensor.shape, dtype)
        count = (tensor.end - tensor.start) // dtype.itemsize
        return np.frombuffer(self._bytes, dtype, count, tensor.start).reshape(tensor.shape)


class CheckpointFiles:
    """All safetensors files of a directory, checked against its index in both directions.

    - `directory`: where they lie.
    - `tensors`: header entries of all files by tensor name.
    """

    def __init__(self, directory: Path) -> None:
        """Reads the index and all headers; see `SafetensorsFile` for what is checked in each.

        **Raises:** `CheckpointError` where a file or tensor is missing, extra or doubled.
        """
        self.directory = directory
        index = directory / "model.safetensors.index.json"
        present = sorted(path.name for path in directory.glob("*.safetensors"))
        weight_map = read_index(index)[0] if index.is_file() else None
        names = present if weight_map is None else sorted(set(weight_map.values()))
        if not names:
            raise CheckpointError(
                f"{index} names no files" if index.is_file() else f"{directory} holds no safetensors files"
            )
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{directory}: {len(absent)} of {len(names)} files are missing, perhaps still downloading: "
                f"{_some(absent)}"
            )
        unnamed = sorted(set(present) - set(names))
        if unnamed:
            raise CheckpointError(
                f"{directory}: the index does not name {_some(unnamed)}; move what does not belong here away"
            )
        self.files = {name: SafetensorsFile(directory / name) for name in names}
        self.tensors: dict[str, TensorInfo] = {}
        for file in self.files.values():
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(f"tensor {name} is in two files: {self.tensors[name].path} and {tensor.path}")
                self.tensors[name] = tensor
        if weight_map is not None:
            self._check_index(weight_map)

    def _check_index(self, weight_map: dict[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self.files[file].tensors:
                raise CheckpointError(
                    f"tensor {name} is missing: the index places it in {self.directory / file}, "
                    "whose header does not list it"
                )
        unlisted = [tensor for name, tensor in self.tensors.items() if name not in weight_map]
        if unlisted:
            others = f", nor {len(unlisted) - 1} others" if len(unlisted) > 1 else ""
            raise CheckpointError(
                f"extra tensor {unlisted[0].name} in {unlisted[0].path}: the index does not list it{others}"
            )

    def view(self, name: str) -> np.ndarray:
        """A tensor of any of the files; see `SafetensorsFile.view`."""
        return self.files[self.tensors[name].path.name].view(name)


def read_index(path: Path, text: str | None = None) -> tuple[dict[str, str], int | None]:
    """The `weight_map` of an index file, tensor name → file name, and the `total_size` where it states one.

    `text` stands in place of the file's content.

    **Raises:** `CheckpointError` where it is not such a file, lists a tensor twice, or names a file that does not
    lie in the index's own directory.
    """

    try:
        raw = json.loads(
            path.read_text(encoding="utf-8") if text is None else text, object_pairs_hook=partial(_unrepeated, path)
        )
        weight_map = raw["weight_map"]
        files = set(weight_map.values())
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: not a safetensors index: no 'weight_map' in it") from None
    for file in files:
        if not isinstance(file, str) or not file or Path(file).name != file or "\\" in file or file == "..":
            name = next(name for name, place in weight_map.items() if place == file)
            raise CheckpointError(
                f"{path}: tensor {name} is placed in {file!r}; only a file of the same directory is allowed"
            )
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if isinstance(total, int) else None


def _unrepeated(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`, which would keep the last of two entries of one name in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise CheckpointError(f"{path}: tensor {twice} is listed twice in the header or index")
    return found


def _some(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
