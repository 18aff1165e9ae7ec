"""Reading safetensors files by slices, after proving from the header that the file is whole.

The library's reader maps whole files and, for some dtypes, refuses NumPy; a pod needs the part that one device
holds, from wherever the file lies. Nothing in a file is ever executed or unpickled.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kimi_jax.checkpoint.storage import CheckpointError, File, Folder, LocalFile, LocalFolder, read_bytes

DTYPES: dict[str, np.dtype] = {
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
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: its header entry, with `start` and `end` in bytes from the file's beginning.

    - `path`: the file's full path or URL.
    """

    name: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A safetensors file whose header has been checked against its size.

    - `file`: where its bytes are read from.
    - `tensors`: header entries by name.
    - `metadata`: the header's free-form strings.
    """

    def __init__(self, file: File | Path) -> None:
        """Reads and checks the header.

        **Raises:** `CheckpointError` naming file and tensor where the header is damaged, a tensor is listed twice,
        tensors overlap or leave gaps, or the file is shorter or longer than its header says.
        """
        self.file: File = LocalFile(file) if isinstance(file, Path) else file
        header = self.header()
        self.tensors, self.metadata = parse_header(str(self.file), header)
        _check_layout(str(self.file), self.tensors, len(header), self.file.size)

    def header(self) -> bytes:
        """The bytes before the first tensor, as they lie in the file."""
        size = self.file.size
        start = bytearray(min(8, size))
        self.file.read_into(0, memoryview(start))
        length = int.from_bytes(start, "little")
        if size < 8 or 8 + length > size or length > _MAX_HEADER:
            raise CheckpointError(
                f"{self.file}: truncated or not a safetensors file: {size} bytes, "
                f"of which the header should take {8 + length}"
            )
        raw = bytearray(8 + length)
        self.file.read_into(0, memoryview(raw))
        return bytes(raw)

    def read(
        self, name: str, rows: slice = slice(None), out: np.ndarray | None = None, flat: bool = False
    ) -> np.ndarray:
        """A tensor, or rows of it, in memory of its own or in `out`, of the same bytes.

        `flat`: take it as one row of numbers, of which `rows` chooses some.

        **Raises:** `CheckpointError` naming the file where it cannot be read.
        """
        tensor = self.tensors[name]
        dtype = DTYPES[tensor.dtype]
        shape, start = (math.prod(tensor.shape),) if flat else tensor.shape, tensor.start
        if shape:
            first, last, _ = rows.indices(shape[0])
            shape = (max(0, last - first), *shape[1:])
            start += first * math.prod(shape[1:]) * dtype.itemsize
        if out is None:
            out = np.empty(shape, dtype)
        self.file.read_into(start, out.reshape(-1).view(np.uint8).data)
        return out


def parse_header(where: str, raw: bytes) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The entries by name, and the metadata, of a safetensors header with its eight bytes of length.

    **Raises:** `CheckpointError` naming `where` and the tensor for a damaged entry or a name listed twice.
    """
    try:
        header = json.loads(raw[8:], object_pairs_hook=partial(_unrepeated, where))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{where}: the header must be a JSON object, found {type(header).__name__}")
    metadata: dict[str, str] = header.pop("__metadata__", None) or {}
    return {name: _entry(where, name, entry, len(raw)) for name, entry in header.items()}, metadata


def make_header(entries: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header, with its eight bytes of length, of tensors that follow each other in this order.

    **Arguments:**

    - `entries`: dtype (a key of `DTYPES`) and shape by name.
    - `metadata`: free-form strings; None for what PyTorch's readers look for.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} if metadata is None else dict(metadata)}
    start = 0
    for name, (dtype, shape) in entries.items():
        end = start + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _entry(where: str, name: str, entry: Any, base: int) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        start, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointError(f"{where}: tensor {name}: damaged header entry {entry!r}") from None
    if dtype not in DTYPES:
        raise CheckpointError(f"{where}: tensor {name}: unknown dtype {dtype!r}")
    wanted = math.prod(shape) * DTYPES[dtype].itemsize
    if end - start != wanted or start < 0 or min(shape, default=0) < 0:
        raise CheckpointError(
            f"{where}: tensor {name}: {dtype} {list(shape)} takes {wanted} bytes, the header gives it {end - start}"
        )
    return TensorInfo(name, where, dtype, shape, base + start, base + end)


def _check_layout(where: str, tensors: dict[str, TensorInfo], base: int, size: int) -> None:
    place, last = base, None
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if tensor.start != place:
            fault = "overlaps" if tensor.start < place else "leaves a gap behind"
            before = "the header" if last is None else f"the tensor before it ({last})"
            raise CheckpointError(f"{where}: tensor {tensor.name} {fault} {before}")
        if tensor.end > size:
            raise CheckpointError(
                f"{where}: truncated: tensor {tensor.name} ends at byte {tensor.end}, "
                f"the file has {size}; download the file again"
            )
        place, last = tensor.end, tensor.name
    if place != size:
        raise CheckpointError(
            f"{where}: {size - place} bytes too long: its last tensor ({last}) ends at byte {place}, "
            f"the file has {size}; download the file again"
        )


class CheckpointFiles:
    """All safetensors files of a folder, checked against its index in both directions.

    - `files`: by file name.
    - `tensors`: header entries of all files by tensor name.
    """

    def __init__(self, folder: Folder | Path) -> None:
        """Reads the index and all headers; see `SafetensorsFile` for what is checked in each.

        **Raises:** `CheckpointError` where a file or tensor is missing, extra or doubled.
        """
        folder = LocalFolder(folder) if isinstance(folder, Path) else folder
        listed = folder.names()
        index = f"{folder}/{INDEX}"
        present = [name for name in listed if name.endswith(".safetensors")]
        weight_map = read_index(index, read_bytes(folder.file(INDEX)))[0] if INDEX in listed else None
        names = present if weight_map is None else sorted(set(weight_map.values()))
        if not names:
            raise CheckpointError(
                f"{index} names no files" if weight_map is not None else f"{folder} holds no safetensors files"
            )
        absent = sorted(set(names) - set(listed))
        if absent:
            raise CheckpointError(
                f"{folder}: {len(absent)} of {len(names)} files are missing, perhaps still downloading: {_some(absent)}"
            )
        unnamed = sorted(set(present) - set(names))
        if unnamed:
            raise CheckpointError(
                f"{folder}: the index does not name {_some(unnamed)}; move what does not belong here away"
            )
        self.files = {name: SafetensorsFile(folder.file(name)) for name in names}
        self.tensors: dict[str, TensorInfo] = {}
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in self.files.values():
            for name, tensor in file.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(f"tensor {name} is in two files: {self.tensors[name].path} and {tensor.path}")
                self.tensors[name] = tensor
                self._file_of[name] = file
        if weight_map is not None:
            self._check_index(weight_map)

    def _check_index(self, weight_map: dict[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self.files[file].tensors:
                raise CheckpointError(
                    f"tensor {name} is missing: the index places it in {self.files[file].file}, "
                    "whose header does not list it"
                )
        unlisted = [tensor for name, tensor in self.tensors.items() if name not in weight_map]
        if unlisted:
            others = f", nor {len(unlisted) - 1} others" if len(unlisted) > 1 else ""
            raise CheckpointError(
                f"extra tensor {unlisted[0].name} in {unlisted[0].path}: the index does not list it{others}"
            )

    def read(
        self, name: str, rows: slice = slice(None), out: np.ndarray | None = None, flat: bool = False
    ) -> np.ndarray:
        """A tensor of any of the files, or rows of it; see `SafetensorsFile.read`."""
        return self._file_of[name].read(name, rows, out, flat)

    def numpy_dtype(self, name: str) -> np.dtype:
        """The dtype of a tensor."""
        return DTYPES[self.tensors[name].dtype]


def read_index(where: str, data: bytes) -> tuple[dict[str, str], int | None]:
    """The `weight_map` of an index file, tensor name → file name, and the `total_size` where it states one.

    `data` is the file's content, `where` its name for errors.

    **Raises:** `CheckpointError` where it is not such a file, lists a tensor twice, or names a file that does not
    lie in the index's own directory.
    """
    try:
        raw = json.loads(data, object_pairs_hook=partial(_unrepeated, where))
        weight_map = raw["weight_map"]
        files = set(weight_map.values())
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{where}: not a safetensors index: no 'weight_map' in it") from None
    for file in files:
        if not isinstance(file, str) or not file or Path(file).name != file or "\\" in file or file == "..":
            name = next(name for name, place in weight_map.items() if place == file)
            raise CheckpointError(
                f"{where}: tensor {name} is placed in {file!r}; only a file of the same directory is allowed"
            )
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if isinstance(total, int) else None


def _unrepeated(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`, which would keep the last of two entries of one name in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise CheckpointError(f"{where}: tensor {twice} is listed twice in the header or index")
    return found


def _some(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
