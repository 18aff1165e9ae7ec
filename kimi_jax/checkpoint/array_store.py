"""Orbax checkpoints whose arrays are written block by block and read by slices: no array lies whole in memory.

Orbax names, lists and commits the checkpoint (a temporary folder, renamed when everything is written). Each array is
a zarr array of version 3 in a folder of its own, uncompressed; a file of it (a shard) holds the chunks of one block of
rows, and the chunks are chosen so that the part of one device is whole chunks. Plain
`orbax.checkpoint.PyTreeCheckpointer().restore(path)` reads what is written here.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.checkpoint.zarr_shard import sharded, write_shard
from kimi_jax.parallel.sharding import Axes

BAND = 32 << 20
"""Rows that share their chunks along the first axis take at most this many bytes: the least that is written at once."""
_SPLITS = 2**7 * 3 * 5 * 7  # numbers of devices whose parts are whole chunks: its divisors
_ONE_CHUNK = 4096  # arrays of fewer bytes are not divided


@dataclass(frozen=True)
class StreamedArray:
    """An array to be written.

    - `chunks`: shape of a chunk.
    - `block_rows`: rows of a block, a multiple of `chunks[0]`.
    - `blocks`: called when the array's turn comes; yields its rows in order, block by block.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    block_rows: int
    blocks: Callable[[], Iterator[np.ndarray]]

    @property
    def size(self) -> int:
        """Number of elements; Orbax asks."""
        return math.prod(self.shape)


def chunk_shape(shape: Sequence[int], axes: Axes, itemsize: int) -> tuple[int, ...]:
    """The chunks of an array with these logical axes.

    An axis that the sharding table may split is cut so that up to 128 devices (or 96, 105, …: every divisor of
    13,440 that divides the axis) each find whole chunks; then rows so that a row of chunks takes at most `BAND` bytes.
    """
    if math.prod(shape) * itemsize < _ONE_CHUNK:
        return tuple(shape)
    chunks = list(shape)
    for i, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        if axis is not None:
            parts = axis[1] if isinstance(axis, tuple) else size
            chunks[i] = size // math.gcd(parts, _SPLITS)
    width = math.prod(shape[1:]) * itemsize
    if chunks[0] * width > BAND:
        most = max(1, BAND // width)
        least = most // 2 if axes[0] is None else 0  # rows that no device divides need not be divided evenly
        chunks[0] = next((rows for rows in range(most, least, -1) if chunks[0] % rows == 0), most)
    return tuple(chunks)


def save_arrays(path: Path, tree: Mapping[str, Any], in_flight: int) -> None:
    """Writes one Orbax checkpoint of (nested) dicts of `StreamedArray`; `path` appears when all of it is written.

    At most `in_flight` blocks are held at once, the one being read among them. It is durable after `sync_tree(path)`.

    **Raises:** what reading the blocks raises; `CheckpointError` where writing fails.
    """
    registry = type_handlers.create_type_handler_registry((StreamedArray, _Handler(in_flight)))
    try:
        with _quiet():
            handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_ocdbt=False, use_zarr3=True)
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(path.absolute(), tree, force=True)
    except (ValueError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: writing failed: {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax from warning that there are no jax.Arrays among the leaves, which is meant, and from printing the
    trace of an error that it raises as well."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Handler(type_handlers.NumpyHandler):
    """Tells Orbax how a `StreamedArray` is written; it is restored as any array."""

    def __init__(self, in_flight: int) -> None:
        super().__init__()
        self.in_flight = in_flight

    async def serialize(
        self, values: Sequence[StreamedArray], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Returns one future that writes all arrays, one after the other."""

        async def write_all() -> None:
            for info in infos:
                await info.await_path_creation()
            folders = [(value, Path(info.parent_dir), info.name) for value, info in zip(values, infos, strict=True)]
            await asyncio.to_thread(_write_arrays, folders, self.in_flight)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write_all(), name="kimi_jax")]


def _write_arrays(arrays: Sequence[tuple[StreamedArray, Path, str]], in_flight: int) -> None:
    """Writes arrays, by folder and name, each block in a thread of its own while the next is read."""
    with ThreadPoolExecutor(in_flight) as pool:
        writing: deque[Future[None]] = deque()
        for value, folder, name in arrays:
            columns = (-(-size // c) * c for size, c in zip(value.shape[1:], value.chunks[1:], strict=True))
            shard = (value.block_rows, *columns)
            spec = _spec(folder, name) | {
                "metadata": sharded(value.shape, shard, value.chunks),
                "dtype": value.dtype.name,
            }
            ts.open(spec, create=True, open=False).result()
            place = folder / name / "c"
            rest = ["0"] * (len(shard) - 1)
            for number, block in enumerate(value.blocks()):
                writing.append(pool.submit(write_shard, place.joinpath(str(number), *rest), block, shard, value.chunks))
                if len(writing) == in_flight:
                    writing.popleft().result()
        while writing:
            writing.popleft().result()


def _spec(folder: Path, name: str) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder.absolute()}/{name}/"}}


class ArrayStore:
    """The arrays of one Orbax checkpoint, read by slices."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._open: dict[str, ts.TensorStore] = {}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of the array of that dotted name, in memory of its own.

        **Raises:** `CheckpointError` naming array and folder where it cannot be read.
        """
        try:
            if name not in self._open:
                # A file that is missing must be an error, not zeros.
                spec = _spec(self.path, name) | {"fill_missing_data_reads": False}
                self._open[name] = ts.open(spec, open=True, read=True, context=self._context).result()
            return self._open[name][index].read().result()
        except (ValueError, OSError, IndexError) as error:
            raise CheckpointError(f"{self.path}: array {name} cannot be read: {error}") from error
