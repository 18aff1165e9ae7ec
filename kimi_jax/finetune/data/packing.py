"""Packing: documents go into rows of a fixed number of places.

A place holds a token and the one that follows it in its document, which is to be predicted there. So a document of n
tokens takes n - 1 places: its first token is never predicted, and its last one is no input. One of more places than a
row has is cut. The model starts anew at each piece, but all of a document's tokens after the first stay targets.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from kimi_jax.finetune.data.documents import Document


class Piece(NamedTuple):
    """The places of a document that stand together in a row, n of them.

    - `line`: number of the document's line.
    - `start`: the first of the places, counted within the document.
    - `tokens`, `targets`: inputs, and what is to be predicted from each.
    - `weights`: the targets' weights in the loss.
    """

    line: int
    start: int
    tokens: Int32[np.ndarray, " n"]
    targets: Int32[np.ndarray, " n"]
    weights: Float32[np.ndarray, " n"]


def cut(line: int, document: Document, start: int, length: int) -> Piece:
    """The document's places from `start` on, at most `length` of them."""
    stop = min(start + length, len(document.tokens) - 1)
    tokens, weights = document
    return Piece(line, start, tokens[start:stop], tokens[start + 1 : stop + 1], weights[start + 1 : stop + 1])


class Packer:
    """First fit: each piece goes into the oldest open row that has room, else into a new one.

    A row is finished when it is full, or when more than `window` are open and it is the fullest of them. With a window
    of 0 each piece has a row of its own.

    - `rows`: the open rows, oldest first.
    """

    def __init__(self, length: int, window: int, rows: Sequence[list[Piece]] = ()) -> None:
        """Begins with some open rows of `length` places."""
        self.rows = list(rows)
        self._length = length
        self._window = window
        self._room = [length - filled(row) for row in rows]

    def add(self, piece: Piece) -> list[Piece] | None:
        """Puts a piece of at most `length` places into a row. **Returns:** the row that this finishes, if any."""
        needed = len(piece.tokens)
        place = next((i for i, room in enumerate(self._room) if needed <= room), len(self.rows))
        if place == len(self.rows):
            self.rows.append([])
            self._room.append(self._length)
        self.rows[place].append(piece)
        self._room[place] -= needed
        if self._room[place] == 0:
            return self._finish(place)
        return self._finish(self._room.index(min(self._room))) if len(self.rows) > self._window else None

    def take(self) -> list[Piece] | None:
        """The oldest open row, for when no more pieces come; None without one."""
        return self._finish(0) if self.rows else None

    def _finish(self, place: int) -> list[Piece]:
        del self._room[place]
        return self.rows.pop(place)


def filled(row: Sequence[Piece]) -> int:
    """Places of the row that are taken."""
    return sum(len(piece.tokens) for piece in row)
