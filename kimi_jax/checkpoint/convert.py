"""From a Hugging Face checkpoint to one of ours, part by part, within a budget of memory, resumable at any instant.

See `manifest.py` for the format. Processes share the parts out by number and need no word with each other: each
writes whole parts and their records, and whoever writes the last record completes the manifest.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from kimi_jax.checkpoint.array_store import BAND, StreamedArray, chunk_shape, save_arrays
from kimi_jax.checkpoint.converted import check_part
from kimi_jax.checkpoint.manifest import (
    REST,
    UNUSED,
    ArrayRecord,
    Manifest,
    Progress,
    Record,
    digest,
    enter_parts,
    free_space,
    header_file,
    is_converted,
    locked,
    part_folder,
    read_manifest,
    read_record,
    record_file,
    small_file,
    sync_tree,
    write_durably,
    write_manifest,
    write_record,
)
from kimi_jax.checkpoint.safetensors_file import SafetensorsFile
from kimi_jax.checkpoint.source import HuggingFaceSource
from kimi_jax.checkpoint.storage import CheckpointError, local_destination, read_bytes, small_files
from kimi_jax.model.model import abstract_params, nest

IN_FLIGHT = 4
"""Blocks being written while the next is read."""
WRITER_FACTOR = 16
"""Peak memory of writing, in blocks, as measured with room to spare: those in flight, the one being read, and more."""
LARGEST_BLOCK = BAND  # a row of chunks is never more
_SAMPLES, _SAMPLE = 16, 4096


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
        return math.prod(self.shape[1:]) * self.dtype.itemsize * self.chunks[0]

    def block_rows(self, block: int) -> int:
        """Rows that are read and written at once: as many rows of chunks as `block` bytes hold, at least one."""
        return max(1, min(block // max(1, self.band_bytes), self.bands)) * self.chunks[0]

    @property
    def bands(self) -> int:
        """Number of rows of chunks."""
        return math.ceil(self.shape[0] / self.chunks[0])


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
        size, dtype = math.prod(source.files.tensors[name].shape), source.files.numpy_dtype(name)
        if size:
            parts.setdefault(UNUSED, {})[name] = PlannedArray(
                (size,),
                dtype,
                chunk_shape((size,), (None,), dtype.itemsize),
                lambda rows, name=name: source.files.read(name, rows, flat=True),  # type: ignore[misc]
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
    - `overwrite`: take a finished conversion up again: parts of this source whose bytes prove right stay, the rest is
        made anew; that of another source is replaced.
    - `process_index`, `process_count`: this process converts every `process_count`-th part.
    - `progress`: called with what is going on, bytes done and bytes in all of this process.

    **Returns:** the manifest; `complete` is False while other processes have parts to write.

    **Raises:** `CheckpointError` where the source is not whole, the destination is something else, its disk or the
    budget of memory is too small, or reading or writing fails. What is done stays done. `ValueError` from
    `check_processes`.
    """
    directory = local_destination(directory)
    check_processes(process_index, process_count, overwrite)
    _refuse_foreign(source, directory)
    opened = HuggingFaceSource(source)
    parts = plan_parts(opened)
    block = block_bytes(parts, max_memory)
    fresh = _manifest_of(opened, parts)
    directory.mkdir(parents=True, exist_ok=True)
    busy = f"{directory}: another process {process_index} of {process_count} is converting into it"
    with locked(directory / f".convert-{process_index}-of-{process_count}.lock", busy):
        _refuse_other_counts(directory, process_count)
        manifest = _prepare(opened, directory, fresh, overwrite)
        if manifest.complete:
            return manifest
        tell = progress or (lambda *_: None)
        own = list(parts)[process_index::process_count]
        proved = {part: _proved(directory, part, parts[part], fresh.source_digest, tell) for part in own}
        enter_parts(directory, proved)
        left = [part for part in own if not proved[part]]
        total = sum(array.nbytes for part in left for array in parts[part].values())
        free_space(directory, total)
        done = 0

        def count(part: str, more: int) -> None:
            nonlocal done
            done += more
            tell(f"writing {part}", done, total)

        def finish(part: str, record: Record) -> None:
            sync_tree(part_folder(directory, part))
            write_record(directory, part, fresh.source_digest, record)
            enter_parts(directory, {part: True})

        # While a part is being written, the one before it is made durable and recorded.
        with ThreadPoolExecutor(1) as finisher:
            finishing: Future[None] | None = None
            for part in left:
                record = _write_part(directory, part, parts[part], block, partial(count, part))
                if finishing is not None:
                    finishing.result()
                finishing = finisher.submit(finish, part, record)
            if finishing is not None:
                finishing.result()
    return enter_parts(directory, {})


def check_processes(process_index: int, process_count: int, overwrite: bool) -> None:
    """**Raises:** `ValueError` for a process that is none of so many, or for several that overwrite."""
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index {process_index} must be from 0 to process_count - 1 = {process_count - 1}")
    if overwrite and process_count > 1:
        raise ValueError(f"overwrite is for one process: {process_count} would undo each other's work")


def _refuse_foreign(source: str | Path, directory: Path) -> None:
    """Nothing is touched in a folder that is the source, or holds something else than a conversion."""
    if Path(source).resolve() == directory.resolve():
        raise CheckpointError(f"{directory} is the source itself; choose another destination")
    if directory.is_dir() and not is_converted(directory):
        found = [path.name for path in directory.iterdir() if not path.name.startswith(".")]
        if found:
            raise CheckpointError(
                f"{directory} is not empty ({min(found)}) and holds no conversion; choose another destination"
            )


def _refuse_other_counts(directory: Path, process_count: int) -> None:
    for path in directory.glob(".convert-*.lock"):
        if not path.name.endswith(f"-of-{process_count}.lock"):
            others = path.name.removesuffix(".lock").rpartition("-")[2]
            with locked(path, f"{directory}: a conversion by {others} processes is going on"):
                pass


def _manifest_of(source: HuggingFaceSource, parts: dict[str, Part]) -> Manifest:
    """The manifest of a conversion that is about to begin."""
    small = {name: read_bytes(source.folder.file(name)) for name in small_files(source.folder)}
    reserved = {"params", "source"} & small.keys()
    if reserved:
        raise CheckpointError(
            f"{source.folder}: a file called {min(reserved)} has the name of a folder of ours: rename it"
        )
    headers = {name: digest(stored.header()) for name, stored in source.files.files.items()}
    lines = [digest(small["config.json"])]
    for name, stored in source.files.files.items():
        lines.append(f"{name} {stored.file.size} {headers[name]} {digest(_samples(stored))}")
    files = {name: digest(data) for name, data in small.items()}
    source_digest = digest("\n".join(lines).encode())
    return Manifest(False, json.loads(small["config.json"]), source_digest, headers, files, dict.fromkeys(parts))


def _samples(stored: SafetensorsFile) -> bytes:
    """Bytes from all over a file: two models of one layout, such as a fine-tune and its base, differ in them."""
    size = min(_SAMPLE, stored.file.size)
    out = bytearray(size * _SAMPLES)
    for i in range(_SAMPLES):
        start = (stored.file.size - size) * i // (_SAMPLES - 1)
        stored.file.read_into(start, memoryview(out)[i * size : (i + 1) * size])
    return bytes(out)


def _prepare(source: HuggingFaceSource, directory: Path, fresh: Manifest, overwrite: bool) -> Manifest:
    """Makes the destination ready for parts: a manifest, the small files, the headers. Returns the manifest.

    The manifest comes first, and parts count only if their records are of its source: stopped anywhere, the next run
    finds either the old conversion, not complete, or this one.
    """
    with locked(directory / ".manifest.lock"):
        if is_converted(directory):
            manifest = read_manifest(directory)
            if manifest.source_digest != fresh.source_digest or manifest.parts.keys() != fresh.parts.keys():
                if not overwrite:
                    state = "finished" if manifest.complete else "begun"
                    raise CheckpointError(
                        f"{directory} was {state} from another source than {source.folder}: give overwrite to replace "
                        "it, or choose another destination"
                    )
                write_manifest(directory, replace(manifest, complete=False, parts=dict.fromkeys(manifest.parts)))
                for name in manifest.files.keys() - fresh.files.keys():
                    small_file(directory, name).unlink(missing_ok=True)
                for name in manifest.headers.keys() - fresh.headers.keys():
                    header_file(directory, name).unlink(missing_ok=True)
                shutil.rmtree(directory / "params", ignore_errors=True)
            elif manifest.complete and not overwrite:
                return manifest
            else:
                fresh = manifest if not overwrite else fresh
        write_manifest(directory, fresh)
        for folder in ("source", "params"):
            (directory / folder).mkdir(exist_ok=True)
        for name in fresh.files:
            write_durably(small_file(directory, name), read_bytes(source.folder.file(name)))
        for name, stored in source.files.files.items():
            write_durably(header_file(directory, name), stored.header())
    return fresh


def _proved(directory: Path, part: str, arrays: Part, source_digest: str, tell: Progress) -> bool:
    """Whether a part is there, of this source, its bytes those of its record; what is not proved is taken away."""
    path, folder = record_file(directory, part), part_folder(directory, part)
    if path.is_file():
        try:
            record = read_record(directory, part, source_digest=source_digest)
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


def _write_part(directory: Path, part: str, arrays: Part, block: int, tell: Callable[[int], None]) -> Record:
    digests: dict[str, list[Future[str]]] = {name: [] for name in arrays}

    def blocks(name: str, hasher: ThreadPoolExecutor) -> Iterator[np.ndarray]:
        array = arrays[name]
        rows, size, step = array.chunks[0], array.shape[0], array.block_rows(block)
        for start in range(0, size, step):
            data = np.ascontiguousarray(array.read(slice(start, min(start + step, size))))
            bands = [data[i : i + rows] for i in range(0, len(data), rows)]
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
        tree = (
            streamed if part == UNUSED else nest(streamed)
        )  # names that no parameter uses may be each other's beginning
        save_arrays(part_folder(directory, part), tree, in_flight=IN_FLIGHT)
    return {
        name: ArrayRecord(array.shape, array.dtype.name, array.chunks, tuple(d.result() for d in digests[name]))
        for name, array in arrays.items()
    }
