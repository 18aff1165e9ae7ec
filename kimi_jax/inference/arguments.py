"""Checks of what callers pass in, and the padded sizes for which functions are compiled.

JAX clamps an index outside an array in silence; a token id outside the vocabulary is refused here instead.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kimi_jax.config import ModelConfig
from kimi_jax.model.model import Model
from kimi_jax.parallel.distributed import fetch
from kimi_jax.parallel.mesh import MeshError, axis_size

ArrayLike = np.ndarray | jax.Array | Sequence[Any]

SMALLEST_CACHE = 256
"""Tokens that a cache made by `cache_room` can hold at least."""
BUCKETS = (1, 16, 64, 256, 1024)
"""Padded lengths that calls are compiled for; longer ones are padded to multiples of the last."""


def bucket(tokens: int) -> int:
    """The padded length for which a call of `tokens` tokens is compiled: a new prompt length compiles nothing new.

    Coarse on purpose: a short prefill costs the reading of the weights, whatever its length, and compiling a large
    model takes minutes.
    """
    last = BUCKETS[-1]
    return next((size for size in BUCKETS if tokens <= size), -(-tokens // last) * last)


def cache_room(config: ModelConfig, tokens: int) -> int:
    """The `max_len` of a cache for `tokens` tokens a row, rounded up: it is part of what is compiled."""
    return min(bucket(max(tokens, SMALLEST_CACHE)), config.max_positions)


def token_array(config: ModelConfig, tokens: ArrayLike, rank: int) -> np.ndarray:
    """`tokens` as int32 of `rank` dimensions.

    **Raises:** `ValueError` for another rank, numbers that are no integers, or an id outside the vocabulary.
    """
    array = _integers("tokens", tokens)
    if array.ndim != rank:
        shape = "[B, T]" if rank == 2 else "[B]"
        raise ValueError(f"tokens must have the shape {shape}, found {list(array.shape)}")
    size = config.vocab_size
    outside = array[(array < 0) | (array >= size)]
    if outside.size:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {size} (0 to {size - 1})")
    return array.astype(np.int32)


def length_array(lengths: ArrayLike | None, batch: int, tokens: int) -> np.ndarray:
    """`lengths` as int32 `[B]`, each between 0 and `tokens`; None means `tokens` everywhere."""
    if lengths is None:
        return np.full(batch, tokens, np.int32)
    array = _integers("lengths", lengths)
    if array.shape != (batch,):
        raise ValueError(f"lengths must have the shape [{batch}], one a row, found {list(array.shape)}")
    if np.any((array < 0) | (array > tokens)):
        wrong = array[(array < 0) | (array > tokens)][0]
        raise ValueError(f"a length must lie between 0 and the {tokens} tokens given a row, found {wrong}")
    return array.astype(np.int32)


def row_mask(name: str, rows: ArrayLike | None, batch: int) -> np.ndarray:
    """`rows` as bool `[B]`; None means all."""
    if rows is None:
        return np.ones(batch, bool)
    array = np.asarray(rows)
    if array.dtype != np.bool_ or array.shape != (batch,):
        raise ValueError(f"{name} must be bool [{batch}], found {array.dtype} {list(array.shape)}")
    return array


def check_batch(model: Model, batch: int) -> None:
    """Refuses a batch that the mesh's `data` axis does not divide, and a model whose layers are not all there."""
    if model.absent_layers:
        raise ValueError(
            f"this model was loaded with `layers`: {len(model.absent_layers)} of its layers have no numbers "
            f"(the first is {model.absent_layers[0]}); load it whole to run it"
        )
    data = axis_size(model.mesh, "data")
    if batch < 1 or batch % data:
        raise MeshError(f"a batch of {batch} cannot be split over mesh axis 'data' of {data}: pad it to a multiple")


def pad_tokens(tokens: np.ndarray) -> np.ndarray:
    """`[B, T]` right-padded with zeros to its bucket."""
    return np.pad(tokens, [(0, 0), (0, bucket(tokens.shape[1]) - tokens.shape[1])])


def _integers(name: str, values: ArrayLike) -> np.ndarray:
    try:
        array = np.asarray(fetch(values) if isinstance(values, jax.Array) else values)
    except ValueError:
        raise ValueError(f"{name} must be rectangular: pad the rows on the right and give their lengths") from None
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int32)  # an empty list
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be whole numbers, found {array.dtype}")
    return array.astype(np.int64) if array.dtype != np.uint64 else array
