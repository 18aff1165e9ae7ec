"""The format of a converted checkpoint: what lies where, and the records that prove it.

    manifest.json           format, version, whether complete, configuration, the source's digest, those of the records
    config.json, …          every small file of the source: tokenizer, generation configuration, licence
    params/<part>/          one Orbax checkpoint a part: layers.0, layers.1, …, rest, and unused (the vision tower)
    params/<part>.json      its record: each array's shape, dtype and chunks, and a SHA-256 of every row of chunks
    source/<file>.header    the header of each safetensors file, so that an export gives the same bytes

Arrays keep the checkpoint's dtypes; packed experts stay packed bytes, stacked over experts, one chunk an expert. On
disk an array is divided into blocks of whole experts or rows, at most 32 MiB each, a file a block: that is all that
conversion holds in memory of an array, however large it is.

A record is written after its part is on the disk, and the manifest is marked complete when every record is there, so
that what no record names does not count.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from kimi_jax.checkpoint.safetensors_file import INDEX
from kimi_jax.checkpoint.storage import CheckpointError

FORMAT = "kimi_jax checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
UNUSED = "unused"
REST = "rest"
Progress = Callable[[str, int, int], None]
"""Called with what is going on, bytes done and bytes in all."""


@dataclass(frozen=True)
class ArrayRecord:
    """One array of a part.

    - `dtype`: NumPy's name of it.
    - `chunks`: shape of a chunk.
    - `digests`: SHA-256 of each band of `chunks[0]` rows, in order, over the rows' bytes in C order.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    digests: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Rows of a band."""
        return self.chunks[0]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.itemsize

    def band(self, number: int) -> tuple[slice, ...]:
        """The slice that a digest is of."""
        start = number * self.rows
        return (slice(start, min(start + self.rows, self.shape[0])),)


Record = Mapping[str, ArrayRecord]
"""Of one part: arrays by dotted name."""


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    - `complete`: whether every part is there.
    - `config`: the content of the source's `config.json`.
    - `source_digest`: SHA-256 over configuration, headers and samples of the weights of the source.
    - `headers`, `files`: SHA-256 of the kept header of each safetensors file, and of each small file.
    - `parts`: SHA-256 of each part's record; None where the part is not done.
    """

    complete: bool
    config: dict[str, Any]
    source_digest: str
    headers: dict[str, str]
    files: dict[str, str]
    parts: dict[str, str | None]

    @property
    def done(self) -> int:
        """Number of parts that are done."""
        return sum(digest is not None for digest in self.parts.values())


def digest(data: Any) -> str:
    """SHA-256 of bytes or of a contiguous array's bytes, in hexadecimal."""
    return hashlib.sha256(raw_bytes(data) if isinstance(data, np.ndarray) else data).hexdigest()


def raw_bytes(array: np.ndarray) -> memoryview:
    """An array's bytes in C order, without a copy where they lie so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def part_folder(directory: Path, part: str) -> Path:
    """Where the Orbax checkpoint of a part lies."""
    return directory / "params" / part


def record_file(directory: Path, part: str) -> Path:
    """Where the record of a part lies."""
    return directory / "params" / f"{part}.json"


def header_file(directory: Path, file: str) -> Path:
    """Where the header of a safetensors file of the source is kept."""
    return directory / "source" / f"{file}.header"


def small_file(directory: Path, name: str) -> Path:
    """Where a small file of the source is kept; an index with the headers, lest the folder be taken for theirs."""
    return directory / "source" / name if name == INDEX else directory / name


def is_converted(directory: Path) -> bool:
    """Whether a folder is a converted checkpoint, finished or not."""
    return (directory / MANIFEST).is_file()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a converted checkpoint.

    **Raises:** `CheckpointError` where it is damaged, of another format, or of a newer version than this one knows.
    """
    path = directory / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        found, version = raw["format"], raw["format_version"]
        if found != FORMAT:
            raise CheckpointError(f"{path}: format {found!r}, wanted {FORMAT!r}")
        if not isinstance(version, int) or version > VERSION:
            raise CheckpointError(
                f"{path}: format version {version!r}; this kimi_jax knows versions up to {VERSION}: install a newer one"
            )
        tables = (dict(raw[key]) for key in ("headers", "files", "parts"))
        return Manifest(bool(raw["complete"]), dict(raw["config"]), str(raw["source_digest"]), *tables)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is no converted checkpoint: it has no {MANIFEST}") from None
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a manifest of a converted checkpoint: {error!r}") from None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes the manifest; a reader sees the old one or the new one, never a part."""
    raw = {"format": FORMAT, "format_version": VERSION, **asdict(manifest)}
    write_durably(directory / MANIFEST, json.dumps(raw, indent=1).encode())


def read_record(directory: Path, part: str, wanted: str | None = None, source_digest: str | None = None) -> Record:
    """The record of a part. `wanted` is its digest by the manifest, `source_digest` that of the source it must be of.

    **Raises:** `CheckpointError` where it is missing, damaged, or not the one that the manifest means.
    """
    path = record_file(directory, part)
    try:
        data = path.read_bytes()
        if wanted is not None and digest(data) != wanted:
            raise CheckpointError(f"{path}: its digest is not the one in {directory / MANIFEST}: the file was changed")
        raw = json.loads(data)
        if source_digest is not None and raw["source"] != source_digest:
            raise CheckpointError(f"{path}: of a part that was made from another source")
        return {
            name: ArrayRecord(tuple(a["shape"]), a["dtype"], tuple(a["chunks"]), tuple(a["digests"]))
            for name, a in raw["arrays"].items()
        }
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a record of a part: {error!r}") from None


def write_record(directory: Path, part: str, source_digest: str, record: Record) -> None:
    """Writes the record of a part, made from the source of that digest."""
    arrays = {name: asdict(array) for name, array in record.items()}
    write_durably(record_file(directory, part), json.dumps({"source": source_digest, "arrays": arrays}).encode())


def enter_parts(directory: Path, parts: Mapping[str, bool]) -> Manifest:
    """Enters into the manifest which parts are proved and which are not; returns the new one.

    Under a lock that processes share. The manifest is complete when every part has been entered as proved.
    """
    with locked(directory / ".manifest.lock"):
        manifest = read_manifest(directory)
        entered = dict(manifest.parts)
        for part, proved in parts.items():
            entered[part] = digest(record_file(directory, part).read_bytes()) if proved else None
        manifest = replace(manifest, complete=None not in entered.values(), parts=entered)
        write_manifest(directory, manifest)
    return manifest


def check_small_files(directory: Path, manifest: Manifest) -> None:
    """**Raises:** `CheckpointError` naming a small file or header that is missing or is not as it came."""
    places = {header_file(directory, name): wanted for name, wanted in manifest.headers.items()}
    places |= {small_file(directory, name): wanted for name, wanted in manifest.files.items()}
    for path, wanted in places.items():
        if not path.is_file() or digest(path.read_bytes()) != wanted:
            raise CheckpointError(
                f"{path} is {'not as it came' if path.is_file() else 'missing'}: put it back, or convert the source "
                "again with overwrite"
            )


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file so that after a crash it is the old one or the new one."""
    with durable_file(path) as file:
        file.write(data)


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """A file to be written, under another name until it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_tree(path: Path) -> None:
    """Makes all files below a folder durable, and the folder's own name."""
    for folder, _, files in os.walk(path):
        for name in files:
            with open(Path(folder) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(folder))
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def locked(path: Path, busy: str | None = None) -> Iterator[None]:
    """Holds a lock file; the system frees it when the process ends, however that happens.

    `busy`: raise a `CheckpointError` of this text rather than wait.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise CheckpointError(str(busy)) from None
        yield


def free_space(path: Path, needed: int) -> None:
    """**Raises:** `CheckpointError` where the disk of `path` has less than `needed` bytes left."""
    free = shutil.disk_usage(path).free
    if free < needed:
        raise CheckpointError(
            f"{path}: {needed:,} bytes are needed, the disk has {free:,} left: free {needed - free:,} more"
        )
