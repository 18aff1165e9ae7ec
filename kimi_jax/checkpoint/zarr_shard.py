"""One file of a sharded zarr array, written from memory as it lies.

tensorstore reads these files and could write them, at the price of copying every byte on the way: a conversion is
bound by just that. The format is zarr 3 with the codec `sharding_indexed`
(https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/): the chunks, each followed by its CRC-32C,
then an index of where each begins and how long it is, with a CRC-32C of its own.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import numpy as np

_RAW = {"name": "bytes", "configuration": {"endian": "little"}}
_CHECKSUM = {"name": "crc32c"}  # of each chunk: damage is an error where it is read, on a pod too
_ABSENT = 2**64 - 1  # offset and length of a chunk that lies outside the array


def sharded(shape: Sequence[int], shard: Sequence[int], chunks: Sequence[int]) -> dict[str, object]:
    """What a `zarr.json` says of an array whose files are written by `write_shard`."""
    inner = {"chunk_shape": chunks, "codecs": [_RAW, _CHECKSUM], "index_codecs": [_RAW, _CHECKSUM]}
    return {
        "shape": shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }


def write_shard(path: Path, block: np.ndarray, shard: Sequence[int], chunks: Sequence[int]) -> None:
    """Writes the elements of one shard.

    **Arguments:**

    - `path`: `c/<place in the grid of shards>` below the array's folder.
    - `block`: the shard's part of the array; smaller than `shard` at the array's end, where chunks are filled up with
        zeros.
    - `shard`, `chunks`: sizes of a shard and of a chunk; the one a multiple of the other.

    **Raises:** `OSError` where the disk refuses.
    """
    index = np.full([*(s // c for s, c in zip(shard, chunks, strict=True)), 2], _ABSENT, "<u8")
    offset = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for place in np.ndindex(index.shape[:-1]):
            part = block[tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, chunks, strict=True))]
            if not part.size:
                continue
            if part.size < math.prod(chunks):
                part = np.pad(part, [(0, size - found) for size, found in zip(chunks, part.shape, strict=True)])
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            file.write(data.data)
            file.write(_checksum(data))
            index[place] = offset, data.size + 4
            offset += data.size + 4
        file.write(index.tobytes())
        file.write(_checksum(index.reshape(-1).view(np.uint8)))


def _checksum(data: np.ndarray) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(4, "little")
