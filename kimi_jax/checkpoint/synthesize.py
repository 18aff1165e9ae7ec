"""Synthetic checkpoints of any size in the real layout, for tests, benchmarks and dry runs. They write no sense.

Every tensor depends on the seed and its name alone. Matrices are scaled by their fan-in, so that activations keep
their size through the layers and the router's scores spread over the experts.
"""

import json
import math
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import NormalDist

import ml_dtypes
import numpy as np

from kimi_jax.checkpoint.manifest import Progress, durable_file, free_space, raw_bytes, write_durably
from kimi_jax.checkpoint.names import LANGUAGE_PREFIX, StoredTensor, stored_tensors, vision_tensors
from kimi_jax.checkpoint.safetensors_file import DTYPES, INDEX, make_header
from kimi_jax.checkpoint.storage import CheckpointError, local_destination
from kimi_jax.config import ModelConfig, find_config

PIECE = 1 << 24
"""Elements made at once."""
_CODE_RMS = math.sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)  # of the sixteen MXFP4 codes, equally likely


def synthesize(
    source: str | Path,
    out: str | Path,
    *,
    seed: int = 0,
    file_bytes: int = 16_700_000_000,
    progress: Progress | None = None,
) -> int:
    """Writes a checkpoint with random weights, as a stream.

    **Arguments:**

    - `source`: a configuration file, a directory that holds one, or a shipped name.
    - `out`: a new directory.
    - `seed`: of the weights.
    - `file_bytes`: tensors go to a new file when one would pass this size.
    - `progress`: called with the file's name, bytes done and bytes in all.

    **Returns:** the number of safetensors files.

    **Raises:** `ConfigError` for the configuration, `CheckpointError` where `out` is not empty or its disk too small.
    """
    path, out = find_config(source), local_destination(out)
    if seed < 0:
        raise ValueError(f"seed {seed} must be at least 0")
    config = ModelConfig.from_file(path)
    if out.is_dir() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; choose another directory")
    out.mkdir(parents=True, exist_ok=True)
    files = _divide(config, file_bytes)
    sizes = [sum(map(_nbytes, tensors.values())) for tensors in files]
    done, total = 0, sum(sizes)
    free_space(out, total)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):06d}.safetensors"
        with durable_file(out / name) as file:
            file.write(make_header({full: (t.dtypes[0], t.shapes[0]) for full, t in tensors.items()}))
            for full, tensor in tensors.items():
                for piece in _values(tensor, config, np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])):
                    file.write(raw_bytes(piece))
                    done += piece.nbytes
                    if progress is not None:
                        progress(name, done, total)
                weight_map[full] = name
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_durably(out / INDEX, json.dumps(index, indent=1).encode())
    write_durably(out / "config.json", path.read_bytes())
    return len(files)


def _divide(config: ModelConfig, file_bytes: int) -> list[dict[str, StoredTensor]]:
    """Tensors by full name, one dict a file."""
    prefix = LANGUAGE_PREFIX if config.wrapped else ""
    named = {prefix + tensor.name: tensor for tensor in stored_tensors(config)}
    if config.vision is not None:
        named |= {tensor.name: tensor for tensor in vision_tensors(config.vision)}
    files: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for full, tensor in named.items():
        if files[-1] and size + _nbytes(tensor) > file_bytes:
            files.append({})
            size = 0
        files[-1][full] = tensor
        size += _nbytes(tensor)
    return files


def _nbytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shapes[0]) * DTYPES[tensor.dtypes[0]].itemsize


def _values(tensor: StoredTensor, config: ModelConfig, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """A tensor's numbers in pieces of at most `PIECE` elements, flat."""
    shape, name = tensor.shapes[0], tensor.name
    size, dtype = math.prod(shape), DTYPES[tensor.dtypes[0]]
    if name.endswith(".A_log"):
        heads = min(size, config.kda.num_heads)
        yield np.concatenate([np.log(rng.uniform(1, 16, heads)), np.zeros(size - heads)]).astype(dtype)
        return
    for start in range(0, size, PIECE):
        count = min(PIECE, size - start)
        if name.endswith(".weight_packed"):
            yield rng.integers(0, 256, count, np.uint8)
        elif name.endswith(".weight_scale"):
            exponent = round(math.log2(1 / (_CODE_RMS * math.sqrt(32 * shape[1]))))
            yield (127 + exponent + rng.integers(-1, 2, count)).astype(np.uint8)
        else:
            mean, deviation = _moments(name, shape)
            yield _normal_table(dtype.name, mean, deviation)[rng.integers(0, 1 << 16, count, np.uint16)]


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's numbers."""
    if name.endswith(".e_score_correction_bias"):
        return 0.0, 0.02
    if name.endswith(".dt_bias"):
        return -3.0, 1.0  # most channels remember for tens of tokens
    if name.endswith("norm.bias"):
        return 0.0, 0.1
    if "norm" in name.rpartition(".")[0].rpartition(".")[2]:
        return 1.0, 0.1
    if "_conv1d." in name:
        return 0.0, 0.5
    if name.endswith("embed_tokens.weight"):
        return 0.0, 1.0
    return 0.0, 1 / math.sqrt(math.prod(shape[1:]))


@cache
def _normal_table(dtype: str, mean: float, deviation: float) -> np.ndarray:
    """The 65,536 quantiles of a normal distribution."""
    return (mean + deviation * _quantiles()).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@cache
def _quantiles() -> np.ndarray:
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / (1 << 16)) for i in range(1 << 16)])
