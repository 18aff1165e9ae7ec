"""A reader and writer of safetensors files on raw bytes, independent of the package, for damaging checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.storage import CheckpointError

NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "U8": np.uint8,
}
INDEX = "model.safetensors.index.json"


class Tensor(NamedTuple):
    """One stored tensor: what its header entry says, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> "Tensor":
        dtype = next(name for name, kind in NUMPY.items() if array.dtype == kind)
        return cls(dtype, array.shape, array.tobytes())

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, NUMPY[self.dtype]).reshape(self.shape)


def read_file(path: Path) -> dict[str, Tensor]:
    raw = path.read_bytes()
    base = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:base])
    header.pop("__metadata__", None)
    return {
        name: Tensor(e["dtype"], tuple(e["shape"]), raw[base + e["data_offsets"][0] : base + e["data_offsets"][1]])
        for name, e in header.items()
    }


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    header, data = {}, b""
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        data += tensor.data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_all(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in read_file(path).items()}


@pytest.fixture(scope="session")
def stored():
    """`stored(directory)`: all tensors of a checkpoint by name."""
    return read_all


@pytest.fixture(scope="session")
def rewrite():
    """`rewrite(path, change)`: `change` edits the dict of one file's tensors; the index stays as it is."""

    def edit(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
        tensors = read_file(path)
        change(tensors)
        write_file(path, tensors)

    return edit


@pytest.fixture
def edited(checkpoint):
    """`edited(name, change, config)`: a private copy of a tiny checkpoint, its tensors and config.json edited.

    `change` edits the dict of all tensors; each goes back to the file it came from, a new one to the last file, and
    the index follows. `config` edits, or returns anew, the parsed config.json.
    """

    def edit(
        name: str,
        change: Callable[[dict[str, Tensor]], Any] | None = None,
        config: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None,
    ) -> Path:
        directory: Path = checkpoint(name)
        if change is not None:
            files = sorted(path.name for path in directory.glob("*.safetensors"))
            home = {tensor: file for file in files for tensor in read_file(directory / file)}
            tensors = read_all(directory)
            change(tensors)
            place = {tensor: home.get(tensor, files[-1]) for tensor in tensors}
            for file in files:
                held = {n: t for n, t in tensors.items() if place[n] == file}
                write_file(directory / file, held) if held else (directory / file).unlink()
            (directory / INDEX).write_text(json.dumps({"weight_map": place}))
        if config is not None:
            path = directory / "config.json"
            raw = json.loads(path.read_text())
            path.write_text(json.dumps(config(raw) or raw))
        return directory

    return edit


@pytest.fixture(scope="session")
def refused():
    """`refused(directory, *words)`: loading fails before a byte is placed, with all `words` in the message.

    Returns the message. `error` is the wanted class, other arguments go to `load_model`.
    """

    def check(directory: Path, *words: str, error: type[Exception] = CheckpointError, **arguments: Any) -> str:
        placed: list[tuple[int, int]] = []
        with pytest.raises(error) as caught:
            kj.load_model(directory, progress=lambda *counts: placed.append(counts), **arguments)
        for word in words:
            assert word in str(caught.value)
        assert placed == []
        return str(caught.value)

    return check
