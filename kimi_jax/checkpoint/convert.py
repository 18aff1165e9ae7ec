"""From a Hugging Face checkpoint to one of ours, part by part, within a budget of memory, resumable at any instant.

See `manifest.py` for the format. Processes share the parts out by number and need no word with each other: each
writes whole parts and their records, and whoever writes the last record completes the manifest.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kimi_jax.checkpoint.array_store import StreamedArray, chunk_shape, save_arrays
from kimi_jax.checkpoint.converted import check_part
from kimi_jax.checkpoint.manifest import (
    MANIFEST,
    REST,
    UNUSED,
    ArrayRecord,
    Manifest,
    Record,
    digest,
    free_space,
    header_file,
    is_converted,
    locked,
    part_folder,
    read_manifest,
    read_record,
    record_file,
    sync_tree,
    update_manifest,
    write_durably,
    write_manifest,
    write_record,
)
from kimi_jax.checkpoint.source import HuggingFaceSource
from kimi_jax.checkpoint.storage import CheckpointError, read_bytes, small_files
from kimi_jax.model.model import abstract_params

IN_FLIGHT = 4
"""Blocks being written while the next is read."""
WRITER_FACTOR = 16
"""Peak memory of writing, in blocks, as measured: those in flight, as they came and as they are written, and more."""
LARGEST_BLOCK = 32 << 20
Progress = Callable[[str, int, int], None]
"""Called with what is going on, bytes done and bytes in all."""


@dataclass(frozen=True)
class PlannedArray:
    """One array to be written: a parameter, or a tensor that no parameter uses.

    - `read`: reads rows of it from the source.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    read: Callable[[slice], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def band_bytes(self) -> int:
        """Bytes of one row of chunks, the least that is read and written at once."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize * (self.chunks[0] if self.chunks else 1)

    def block_rows(self, block: int) -> int:
        """Rows that are read and written at once: as many rows of chunks as `block` bytes hold, at least one."""
        return max(1, min(block // max(1, self.band_bytes), self.bands)) * (self.chunks[0] if self.chunks else 1)

    @property
    def bands(self) -> int:
        """Number of rows of chunks."""
        return math.ceil(self.shape[0] / self.chunks[0]) if self.shape else 1


Part = dict[str, PlannedArray]


def plan_parts(source: HuggingFaceSource) -> dict[str, Part]:
    """What goes where: one part a layer, the rest, and what no parameter uses."""
    parts: dict[str, Part] = {}
    for param, (struct, axes) in abstract_params(source.config).items():
        head, _, tail = param.partition(".")
        part = f"{head}.{tail.partition('.')[0]}" if head == "layers" else REST
        dtype = source.dtype(param)
        inner = (slice(None),) * (len(struct.shape) - 1)
        parts.setdefault(part, {})[param] = PlannedArray(
            struct.shape,
            dtype,
            chunk_shape(struct.shape, axes, dtype.itemsize),
            lambda rows, param=param, inner=inner: source.read(param, (rows, *inner)),  # type: ignore[misc]
        )
    for name in source.unused:
        tensor, dtype = source.files.tensors[name], source.files.numpy_dtype(name)
        parts.setdefault(UNUSED, {})[name] = PlannedArray(
            tensor.shape,
            dtype,
            chunk_shape(tensor.shape, (None,) * len(tensor.shape), dtype.itemsize),
            lambda rows, name=name: source.files.read(name, rows),  # type: ignore[misc]
        )
    return parts


def block_bytes(parts: dict[str, Part], max_memory: int) -> int:
    """How much of an array is read and written at once within `max_memory` bytes.

    **Raises:** `CheckpointError` naming the array that needs more, and how much.
    """
    name, array = max(((n, a) for part in parts.values() for n, a in part.items()), key=lambda item: item[1].band_bytes)
    least = WRITER_FACTOR * array.band_bytes
    if least > max_memory:
        raise CheckpointError(
            f"max_memory of {max_memory:,} bytes is too little: array {name} is written in pieces of "
            f"{array.band_bytes:,} bytes, which takes {WRITER_FACTOR} times as much: {least:,}"
        )
    return min(LARGEST_BLOCK, max_memory // WRITER_FACTOR)


def convert(
    source: str | Path,
    directory: str | Path,
    *,
    max_memory: int = 16_000_000_000,
    overwrite: bool = False,
    process_index: int = 0,
    process_count: int = 1,
    progress: Progress | None = None,
) -> Manifest:
    """Converts a Hugging Face checkpoint, or goes on with a conversion that was stopped.

    **Arguments:**

    - `source`: a Hugging Face directory, or its URL for fsspec (`gs://…`, `s3://…`).
    - `directory`: where the converted checkpoint goes, on a file system of this machine.
    - `max_memory`: bytes that the process may use besides the interpreter and the names (1 GB).
    - `overwrite`: replace a finished conversion; one process only.
    - `process_index`, `process_count`: this process converts every `process_count`-th part.
    - `progress`: called with what is going on, bytes done and bytes in all of this process.

    **Returns:** the manifest; `complete` is False while other processes have parts to write.

    **Raises:** `CheckpointError` where the source is not whole, the destination is finished or something else, its
    disk or the budget of memory is too small, or reading or writing fails. What is done stays done.
    """
    directory = Path(directory)
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index {process_index} must be from 0 to process_count - 1 = {process_count - 1}")
    if overwrite and process_count > 1:
        raise ValueError(f"with {process_count} processes, remove {directory} by hand in place of overwrite")
    opened = HuggingFaceSource(source)
    if MANIFEST in opened.folder.names():
        raise CheckpointError(
            f"{opened.folder} holds a {MANIFEST}: is it a converted checkpoint? If not, move that file away"
        )
    parts = plan_parts(opened)
    block = block_bytes(parts, max_memory)
    directory.mkdir(parents=True, exist_ok=True)
    busy = f"{directory}: another process {process_index} of {process_count} is converting into it"
    lock = directory / f".convert-{process_index}-of-{process_count}.lock"
    with locked(lock, busy):
        _refuse_other_counts(directory, process_count)
        _prepare(opened, directory, parts, overwrite)
        tell = progress or (lambda *_: None)
        own = list(parts)[process_index::process_count]
        left = [part for part in own if not _proved(directory, part, parts[part], tell)]
        total = sum(array.nbytes for part in left for array in parts[part].values())
        free_space(directory, total)
        done = 0

        def count(part: str, more: int) -> None:
            nonlocal done
            done += more
            tell(f"writing {part}", done, total)

        # While a part is being written, the one before it is made durable and recorded.
        with ThreadPoolExecutor(1) as finisher:
            finishing: list[Future[None]] = []
            for part in left:
                record = _write_part(directory, part, parts[part], block, partial(count, part))
                finishing = [finisher.submit(_finish_part, directory, part, record), *finishing]
                if len(finishing) > 1:
                    finishing.pop().result()
            for future in finishing:
                future.result()
        lock.unlink()
    return update_manifest(directory)


def _refuse_other_counts(directory: Path, process_count: int) -> None:
    for path in directory.glob(".convert-*.lock"):
        if not path.name.endswith(f"-of-{process_count}.lock"):
            others = path.name.removesuffix(".lock").rpartition("-")[2]
            with locked(path, f"{directory}: a conversion by {others} processes is going on"):
                path.unlink()


def _prepare(source: HuggingFaceSource, directory: Path, parts: dict[str, Part], overwrite: bool) -> None:
    """Makes the destination ready for parts: a manifest, the small files, the headers."""
    config = read_bytes(source.folder.file("config.json"))
    wanted, replaced = _source_digest(source, config), directory / ".replaced"
    fresh = Manifest(False, json.loads(config), wanted, dict.fromkeys(parts))
    shutil.rmtree(replaced, ignore_errors=True)
    with locked(directory / ".manifest.lock"):
        if is_converted(directory):
            manifest = read_manifest(directory)
            if overwrite:
                # Out of the way in one step, so that no old part is ever taken for one of the new conversion. The
                # manifest goes last: stopped before that, the folder is refused as damaged until overwritten.
                if (directory / "params").is_dir():
                    (directory / "params").rename(replaced)
                _clear(directory)
                (directory / MANIFEST).unlink()
                shutil.rmtree(replaced, ignore_errors=True)
            elif manifest.complete:
                raise CheckpointError(f"{directory} is a finished conversion; give overwrite to replace it")
            elif manifest.source_digest != wanted:
                raise CheckpointError(
                    f"{directory} was begun from a source with another configuration or other headers than "
                    f"{source.folder}: go on from that source, or remove {directory}"
                )
            else:
                return
        elif any(not path.name.startswith(".") for path in directory.iterdir()) and not _begun(directory):
            raise CheckpointError(f"{directory} is not empty and holds no conversion; choose another destination")
        else:
            _clear(directory)
        for folder in ("source", "params"):
            (directory / folder).mkdir(exist_ok=True)
        for name in small_files(source.folder):
            file = source.folder.file(name)
            place = directory / "source" if name.endswith(".safetensors.index.json") else directory
            write_durably(place / name, read_bytes(file))
        for name, stored in source.files.files.items():
            write_durably(header_file(directory, name), stored.header())
        write_manifest(directory, fresh)


def _clear(directory: Path) -> None:
    """Takes the small files and headers of another source away."""
    for path in (*directory.iterdir(), *(directory / "source").glob("*")):
        if path.is_file() and path.name != MANIFEST and not path.name.startswith("."):
            path.unlink()


def _begun(directory: Path) -> bool:
    """Whether a conversion was killed before it wrote its manifest: no weights are there yet."""
    source = directory / "source"
    ours = source.is_dir() and all(p.name.startswith(".") or p.suffix in (".header", ".json") for p in source.iterdir())
    return ours and not any((directory / "params").glob("*"))


def _source_digest(source: HuggingFaceSource, config: bytes) -> str:
    lines = [digest(config)]
    lines += [f"{name} {stored.file.size} {digest(stored.header())}" for name, stored in source.files.files.items()]
    return digest("\n".join(lines).encode())


def _proved(directory: Path, part: str, arrays: Part, tell: Progress) -> bool:
    """Whether a part is there, of these arrays, its bytes those of its record; what is not proved is taken away."""
    path, folder = record_file(directory, part), part_folder(directory, part)
    if path.is_file():
        try:
            record = read_record(directory, part)
            found = {n: (a.shape, a.dtype, a.chunks, len(a.digests)) for n, a in record.items()}
            if found != {n: (a.shape, a.dtype.name, a.chunks, a.bands) for n, a in arrays.items()}:
                raise CheckpointError(f"{path}: not the record of this part")
            total = sum(array.nbytes for array in record.values())
            done = 0
            for count in check_part(directory, part, record):
                done += count
                tell(f"proving {part}", done, total)
            return True
        except CheckpointError:
            path.unlink()
    for leftover in folder.parent.glob(f"{part}.orbax*"):
        shutil.rmtree(leftover)
    if folder.exists():
        shutil.rmtree(folder)
    return False


def _finish_part(directory: Path, part: str, record: Record) -> None:
    sync_tree(part_folder(directory, part))
    write_record(directory, part, record)
    update_manifest(directory)


def _write_part(directory: Path, part: str, arrays: Part, block: int, tell: Callable[[int], None]) -> Record:
    digests: dict[str, list[Future[str]]] = {name: [] for name in arrays}

    def blocks(name: str, hasher: ThreadPoolExecutor) -> Iterator[np.ndarray]:
        array = arrays[name]
        rows, size = (array.chunks[0], array.shape[0]) if array.shape else (1, 1)
        step = array.block_rows(block)
        for start in range(0, size, step):
            data = np.ascontiguousarray(array.read(slice(start, min(start + step, size))))
            bands = [data[i : i + rows] for i in range(0, len(data), rows)] if array.shape else [data]
            wait(digests[name])  # one block at a time waits for its digests
            digests[name] += [hasher.submit(digest, band) for band in bands]
            tell(data.nbytes)
            yield data

    with ThreadPoolExecutor(2) as hasher:
        streamed = {
            name: StreamedArray(
                array.shape, array.dtype, array.chunks, array.block_rows(block), partial(blocks, name, hasher)
            )
            for name, array in arrays.items()
        }
        save_arrays(part_folder(directory, part), streamed, in_flight=IN_FLIGHT * block)
    return {
        name: ArrayRecord(array.shape, array.dtype.name, array.chunks, tuple(d.result() for d in digests[name]))
        for name, array in arrays.items()
    }
