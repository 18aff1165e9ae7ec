"""A new Hugging Face checkpoint from another one: some tensors replaced, all others and the small files copied."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kimi_jax.checkpoint.manifest import Progress, durable_file, free_space, is_converted, raw_bytes, write_durably
from kimi_jax.checkpoint.safetensors_file import DTYPES, INDEX, CheckpointFiles, TensorInfo, make_header
from kimi_jax.checkpoint.source import HuggingFaceSource
from kimi_jax.checkpoint.storage import CheckpointError, local_destination, read_bytes, small_files

PIECE = 1 << 24
"""Elements of a copied tensor that are in memory at once."""

Entry = tuple[str, tuple[int, ...]]
"""Safetensors dtype and shape."""


@dataclass(frozen=True)
class Replacement:
    """What takes the place of one stored tensor.

    - `entries`: dtype and shape by name of the tensors that take it.
    - `make`: gives their numbers, in that order, each in one array or in several that follow each other; called once.
    """

    entries: Mapping[str, Entry]
    make: Callable[[], Iterable[np.ndarray]]


def open_source(directory: str | Path) -> HuggingFaceSource:
    """The checkpoint to be rewritten. **Raises:** `CheckpointError` for a converted one, or one that is not whole."""
    if is_converted(Path(directory)):
        raise CheckpointError(f"{directory} is a converted checkpoint: make Hugging Face's files with kimi-jax export")
    return HuggingFaceSource(directory)


def new_folder(out: str | Path) -> Path:
    """A folder to be written into. **Raises:** `CheckpointError` where it is not empty, `ValueError` for a URL."""
    out = local_destination(out)
    if out.is_dir() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; choose another directory")
    return out


def rewrite(
    source: HuggingFaceSource,
    out: str | Path,
    replaced: Mapping[str, Replacement],
    *,
    small: Mapping[str, bytes] | None = None,
    check: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> int:
    """Writes the checkpoint `source` anew, tensor by tensor, into files of the same names.

    **Arguments:**

    - `out`: a new folder. `config.json` comes last: a folder without it was stopped half-way. After an error nothing
        is left in it.
    - `replaced`: by the full name of the tensor in `source`.
    - `small`: small files whose content is to be another.
    - `check`: called when all tensors are written; what it raises undoes them.
    - `progress`: called with the file's name, bytes written and bytes in all.

    **Returns:** the number of safetensors files.

    **Raises:** `CheckpointError` where `out` is not empty, its disk is too small, or a tensor cannot be read.
    """
    out = new_folder(out)
    plans = {name: _plan(file.tensors, replaced) for name, file in source.files.files.items()}
    total = sum(_nbytes(entry) for plan in plans.values() for entries in plan.values() for entry in entries.values())
    contents = {name: read_bytes(source.folder.file(name)) for name in small_files(source.folder)} | dict(small or {})
    if INDEX in contents:
        contents[INDEX] = _index(contents[INDEX], plans, total)
    out.mkdir(parents=True, exist_ok=True)
    free_space(out, total + sum(map(len, contents.values())))
    done = 0
    try:
        for name, plan in plans.items():
            with durable_file(out / name) as file:
                entries = {new: entry for unit in plan.values() for new, entry in unit.items()}
                file.write(make_header(entries, source.files.files[name].metadata))
                for stored in plan:
                    for piece in _pieces(source.files, stored, replaced.get(stored)):
                        file.write(raw_bytes(piece))
                        done += piece.nbytes
                        if progress is not None:
                            progress(name, done, total)
        if check is not None:
            check()
        for name in sorted(contents, key=lambda name: name == "config.json"):
            write_durably(out / name, contents[name])
    except BaseException:
        for path in out.iterdir():
            path.unlink()
        raise
    return len(plans)


def _plan(tensors: Mapping[str, TensorInfo], replaced: Mapping[str, Replacement]) -> dict[str, dict[str, Entry]]:
    """What is written for each stored tensor of a file, in the order of writing: larger elements first, as PyTorch's
    readers want them aligned."""
    plan: dict[str, dict[str, Entry]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        found = replaced.get(name)
        plan[name] = {name: (tensor.dtype, tensor.shape)} if found is None else dict(found.entries)
    return dict(sorted(plan.items(), key=lambda item: -max(DTYPES[dtype].itemsize for dtype, _ in item[1].values())))


def _pieces(files: CheckpointFiles, name: str, replacement: Replacement | None) -> Iterator[np.ndarray]:
    if replacement is not None:
        yield from replacement.make()
        return
    size = math.prod(files.tensors[name].shape)
    for start in range(0, size, PIECE):
        yield files.read(name, slice(start, min(start + PIECE, size)), flat=True)


def _index(old: bytes, plans: Mapping[str, Mapping[str, Mapping[str, Entry]]], total: int) -> bytes:
    raw = json.loads(old)
    metadata = raw.get("metadata")
    raw["metadata"] = (metadata if isinstance(metadata, dict) else {}) | {"total_size": total}
    raw["weight_map"] = {new: file for file, plan in plans.items() for entries in plan.values() for new in entries}
    return json.dumps(raw, indent=2).encode()


def _nbytes(entry: Entry) -> int:
    return math.prod(entry[1]) * DTYPES[entry[0]].itemsize
