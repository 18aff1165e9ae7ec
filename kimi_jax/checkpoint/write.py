"""Writing a model's parameters as a Hugging Face checkpoint in the published layout."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.checkpoint.manifest import durable_file, raw_bytes, write_durably
from kimi_jax.checkpoint.names import LANGUAGE_PREFIX, stored_tensors
from kimi_jax.checkpoint.safetensors_file import DTYPES, make_header
from kimi_jax.checkpoint.storage import CheckpointError, local_destination
from kimi_jax.config import ModelConfig

WEIGHTS = "model.safetensors"
_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}


def write_checkpoint(
    out: str | Path, config: Mapping[str, Any], params: Mapping[str, np.ndarray], files: Mapping[str, bytes]
) -> None:
    """Writes one safetensors file, the small files beside it, and last `config.json`.

    **Arguments:**

    - `out`: a directory; files of the same names are replaced.
    - `config`: the parsed `config.json`, nested or flat. It says whether the experts are packed.
    - `params`: every parameter by its dotted name, experts stacked, as in `kimi_jax.model.model.Params`. They are
        written in their own dtypes: float32 or bfloat16, packed experts uint8.
    - `files`: other files by name, such as those of the tokenizer.

    **Raises:** `CheckpointError` naming the parameter where one is missing, too many, or of another shape or dtype.
    """
    out, read = local_destination(out), ModelConfig.from_dict(config)
    prefix = LANGUAGE_PREFIX if read.wrapped else ""
    # Larger elements first: PyTorch's readers want them aligned.
    found = sorted(published_tensors(read, params), key=lambda item: -item[1].itemsize)
    tensors = {prefix + name: array for name, array in found}
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out / WEIGHTS, tensors)
    for name, data in files.items():
        write_durably(out / name, data)
    write_durably(out / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one safetensors file of arrays in their own dtypes, in this order."""
    with durable_file(path) as file:
        file.write(make_header({name: (_NAMES[array.dtype.name], array.shape) for name, array in tensors.items()}))
        for array in tensors.values():
            file.write(raw_bytes(array))


def published_tensors(config: ModelConfig, params: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a checkpoint by their names without `language_model.`, from parameters as ours are stacked."""
    left = dict.fromkeys(params)
    for tensor in stored_tensors(config):
        name = tensor.param
        assert name is not None
        if name not in params:
            raise CheckpointError(f"parameter {name} is missing: tensor {tensor.name} cannot be written")
        left.pop(name, None)
        array = params[name] if tensor.expert is None else params[name][tensor.expert]
        if _NAMES.get(array.dtype.name) not in tensor.dtypes:
            raise CheckpointError(f"parameter {name} is {array.dtype.name}, wanted one of {', '.join(tensor.dtypes)}")
        yield tensor.name, _published(name, array, tensor.shapes[0])
    if left:
        raise CheckpointError(f"parameter {next(iter(left))} is none of this configuration's")


def _published(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array in its published shape; K3 pads `A_log` with zeros."""
    missing = math.prod(shape) - array.size
    if missing > 0 and name.endswith(".A_log"):
        array = np.concatenate([array, np.zeros(missing, array.dtype)])
    if array.size != math.prod(shape):
        raise CheckpointError(f"parameter {name} has the shape {array.shape}, the file wants {shape}")
    return array.reshape(shape)
