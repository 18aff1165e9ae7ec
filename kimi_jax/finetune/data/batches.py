"""Batches of packed rows: in an order that a seed decides, for any number of processes, from any position on.

    documents = Documents(["train.jsonl"], tokenizer)
    batches = Batches(documents, rows=8, length=4096, seed=1)
    for batch in batches:
        ...
        position = batches.state()  # JSON; restore(position) goes on behind this batch

Every process reads all documents, for which row a document comes to depends on all before it, and keeps its own rows.
So batches are the same whatever the number of processes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from kimi_jax.finetune.data.documents import Document, Documents
from kimi_jax.finetune.data.errors import DataError
from kimi_jax.finetune.data.packing import Packer, Piece, cut, filled

WINDOW = 16
"""Rows that are open at a time when documents are packed."""


class Batch(NamedTuple):
    """Rows of documents: B rows of T places.

    - `tokens`: the inputs, 0 behind the end of a row.
    - `targets`: of each place the token that follows in the document; 0 behind the end.
    - `weights`: what each target counts in the loss; 0 behind the end.
    - `first`: of each place the one in this row where its document begins. The model starts anew there, and sees
      nothing of the places before. Behind the end it is the row's length.
    - `lengths`: places taken of each row; 0 for a row that fills up the last batch.
    """

    tokens: Int32[np.ndarray, "B T"]
    targets: Int32[np.ndarray, "B T"]
    weights: Float32[np.ndarray, "B T"]
    first: Int32[np.ndarray, "B T"]
    lengths: Int32[np.ndarray, " B"]


class Batches:
    """Iterates over batches; see `Batch`.

    Rows go on over the end of an epoch. After the last epoch the open rows are given out, and empty ones fill up the
    last batch.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        rows: int,
        length: int,
        packing: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Stands before the first batch.

        **Arguments:**

        - `documents`: where documents come from.
        - `rows`: rows of the batch of all processes.
        - `length`: places of a row.
        - `packing`: whether documents share rows; otherwise each piece of one has a row of its own.
        - `shuffle`: whether each epoch has an order of its own; otherwise the files' order is kept.
        - `seed`: decides the orders, from 0 on.
        - `epochs`: how often each document comes; None means without end.
        - `process_index`, `process_count`: this process gets the `process_index`-th of `process_count` equal parts of
          the batch's rows. Processes that hold the same rows say the same.

        **Raises:** `ValueError` for a number out of range, or rows that cannot be shared out.
        """
        for name, value, least in (("rows", rows, 1), ("length", length, 1), ("seed", seed, 0), ("epochs", epochs, 1)):
            if value is not None and value < least:
                raise ValueError(f"{name}: found {value}, wanted at least {least}")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index: found {process_index}, wanted 0 to {process_count - 1}")
        if rows % process_count:
            raise ValueError(f"rows: found {rows}, wanted a multiple of the {process_count} processes")
        self._documents = documents
        self._rows = rows
        self._length = length
        self._seed = seed if shuffle else None
        self._epochs = epochs
        share = rows // process_count
        self._own = slice(share * process_index, share * (process_index + 1))
        self._window = WINDOW if packing else 0
        self._packer = Packer(length, self._window)
        self._settings = documents.settings | {"length": length, "packing": packing, "shuffle": shuffle, "seed": seed}
        self._epoch, self._position, self._start = 0, 0, 0
        self._order = _order(len(documents), self._seed, 0)
        self._document: Document | None = None

    @property
    def epochs_done(self) -> float:
        """Epochs behind this position, and of the present one the share of lines that are in rows."""
        return self._epoch + self._position / len(self._documents)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        rows: list[list[Piece]] = []
        while len(rows) < self._rows and (row := self._next_row()) is not None:
            rows.append(row)
        if not rows:
            raise StopIteration
        rows += [[]] * (self._rows - len(rows))
        return _batch(rows[self._own], self._length)

    def state(self) -> dict[str, Any]:
        """The position behind the last batch, as JSON takes it: some numbers for each document in an open row.

        It is the same in every process, and holds for any number of processes and rows a batch.
        """
        return {
            "settings": dict(self._settings),
            "epoch": self._epoch,
            "position": self._position,
            "start": self._start,
            "rows": [[[piece.line, piece.start, len(piece.tokens)] for piece in row] for row in self._packer.rows],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a position that `state` gave. Only the documents of open rows are read for it.

        **Raises:** `DataError` for a position in other data, or under other settings.
        """
        known = state.get("settings", {})
        for name, value in self._settings.items():
            if known.get(name) != value:
                raise DataError(
                    f"the saved position is one of {name} {known.get(name)!r}, but here it is {value!r}: "
                    "go on with the same data and settings, or begin a new run"
                )
        self._epoch, self._position, self._start = state["epoch"], state["position"], state["start"]
        self._order = _order(len(self._documents), self._seed, self._epoch)
        self._document = None
        rows = [[self._piece(*piece) for piece in row] for row in state["rows"]]
        self._packer = Packer(self._length, self._window, rows)

    def _piece(self, line: int, start: int, length: int) -> Piece:
        document = self._documents.read(line)
        if document is None or start + length >= len(document.tokens):
            place = self._documents.lines.place(line)
            raise DataError(f"{place}: not the document of the saved position: has the file changed?")
        return cut(line, document, start, length)

    def _next_row(self) -> list[Piece] | None:
        while (piece := self._next_piece()) is not None:
            row = self._packer.add(piece)
            if row is not None:
                return row
        return self._packer.take()

    def _next_piece(self) -> Piece | None:
        while self._epochs is None or self._epoch < self._epochs:
            line = int(self._order[self._position])
            if self._document is None:
                self._document = self._documents.read(line)
            document, start = self._document, self._start
            if document is None:
                self._next_document()
                continue
            self._start = min(start + self._length, len(document.tokens) - 1)
            if self._start == len(document.tokens) - 1:
                self._next_document()
            return cut(line, document, start, self._length)
        return None

    def _next_document(self) -> None:
        self._document = None
        self._start = 0
        self._position += 1
        if self._position == len(self._documents):
            self._epoch += 1
            self._position = 0
            self._order = _order(len(self._documents), self._seed, self._epoch)


def _order(count: int, seed: int | None, epoch: int) -> np.ndarray:
    """The numbers below `count` in the order of an epoch; without a seed as they are."""
    if seed is None:
        return np.arange(count)
    # NumPy promises the raw bits of a generator for all its versions, but not what `permutation` makes of them.
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(bits, kind="stable")


def _batch(rows: list[list[Piece]], length: int) -> Batch:
    shape = (len(rows), length)
    lengths = np.array([filled(row) for row in rows], np.int32)
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    first = np.repeat(lengths[:, None], length, axis=1)
    for index, row in enumerate(rows):
        start = 0
        for piece in row:
            stop = start + len(piece.tokens)
            tokens[index, start:stop] = piece.tokens
            targets[index, start:stop] = piece.targets
            weights[index, start:stop] = piece.weights
            first[index, start:stop] = start
            start = stop
    return Batch(tokens, targets, weights, first, lengths)
