"""Lines of text files by number, read in any order."""

import hashlib
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.finetune.data.errors import DataError

_BLOCK = 1 << 24  # bytes looked through at a time
_NEWLINE = 10


class Lines:
    """The lines of some files, numbered through from 0.

    The files are looked through once for where lines begin (8 bytes of memory a line) and then read where asked. They
    must not change meanwhile.

    - `paths`: the files.
    - `digest`: tells the files' contents apart from others.
    """

    def __init__(self, paths: Sequence[str | PathLike[str]]) -> None:
        """Looks through the files.

        **Raises:** `DataError` for no files, or one that is missing, unreadable or empty.
        """
        if not paths:
            raise DataError("no data: wanted at least one file of JSON lines")
        self.paths = [Path(path) for path in paths]
        self._bytes = [_mapped(path) for path in self.paths]
        digest = hashlib.sha256(np.array([len(data) for data in self._bytes], np.int64).tobytes())
        self._edges = [_edges(data, digest.update) for data in self._bytes]
        self._first = np.cumsum([0, *(len(edges) - 1 for edges in self._edges)])
        self.digest = digest.hexdigest()[:32]

    def __len__(self) -> int:
        return int(self._first[-1])

    def of_file(self, index: int) -> range:
        """The numbers of the lines of file `index`."""
        return range(int(self._first[index]), int(self._first[index + 1]))

    def read(self, number: int) -> bytes:
        """Line `number`, with its end."""
        file, line = self._place(number)
        start, stop = self._edges[file][line : line + 2]
        return self._bytes[file][start:stop].tobytes()

    def place(self, number: int) -> str:
        """Where line `number` stands, for messages: the file and the line in it, from 1."""
        file, line = self._place(number)
        return f"{self.paths[file]}: line {line + 1}"

    def _place(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"line {number} of {len(self)}")
        file = int(np.searchsorted(self._first, number, side="right")) - 1
        return file, number - int(self._first[file])


def _mapped(path: Path) -> np.ndarray:
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty, wanted lines of JSON")
        return np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _edges(data: np.ndarray, seen: Callable[[Any], None]) -> np.ndarray:
    """Where lines begin, and where the last one ends; `seen` gets the bytes, block after block."""
    found = [np.zeros(1, np.int64)]
    for start in range(0, len(data), _BLOCK):
        block = np.asarray(data[start : start + _BLOCK])
        seen(block)
        found.append(np.flatnonzero(block == _NEWLINE) + (start + 1))
    edges = np.concatenate(found)
    return edges if edges[-1] == len(data) else np.append(edges, len(data))
