"""Text as rows of tokens for the training of a whole model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kimi_jax.chat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Text:
    """A text's `ids`, `[EOS]` behind each document, and its `size` in bytes; `[EOS]` stands for an empty line."""

    ids: np.ndarray
    size: int


def read_text(paths: Sequence[str | Path], tokenizer: Tokenizer) -> Text:
    """Reads UTF-8 files as one text; an empty line ends a document, and so does a file."""
    ids: list[int] = []
    size = 0
    for path in paths:
        text = Path(path).read_text(encoding="utf-8")
        size += len(text.encode())
        for document in filter(None, text.split("\n\n")):
            ids += [*tokenizer.encode(document.removesuffix("\n") + "\n"), tokenizer.eos_id]
    return Text(np.asarray(ids, np.int32), size)


def training_rows(ids: np.ndarray, length: int, batch: int, seed: int, step: int) -> np.ndarray:
    """The rows `[batch, length + 1]` of step `step`, from 0: inputs and, one later, targets.

    The text is cut into rows from another place in every round through it, and each round has an order of its own.
    Both follow from the seed and the number of the round: a step's rows depend on nothing that went before.
    """
    per_round = (len(ids) - length) // length
    if per_round < 1:
        raise ValueError(f"the text has {len(ids)} tokens, too few for a row of {length} and a place to start it")
    rows = []
    for number in range(step * batch, (step + 1) * batch):
        rng = np.random.default_rng([seed, number // per_round])
        first = rng.integers(len(ids) - per_round * length)
        start = first + rng.permutation(per_round)[number % per_round] * length
        rows.append(ids[start : start + length + 1])
    return np.stack(rows)


def evaluation_rows(ids: np.ndarray, length: int, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows `[batch, length + 1]`, and 1 for those of their targets that count: every token but the first, once."""
    targets = len(ids) - 1
    count = -(-targets // length)
    padded = np.pad(ids, (0, count * length + 1 - len(ids)))
    rows = np.stack([padded[at : at + length + 1] for at in range(0, count * length, length)])
    weights = (np.arange(count * length) < targets).astype(np.float32).reshape(count, length)
    for at in range(0, count, batch):
        spare = [(0, max(0, at + batch - count)), (0, 0)]
        yield np.pad(rows[at : at + batch], spare), np.pad(weights[at : at + batch], spare)
