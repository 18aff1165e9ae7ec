"""Where the training of a whole model starts from."""

import math
import zlib

import numpy as np

from kimi_jax.config import ModelConfig
from kimi_jax.model.model import abstract_params

EMBEDDING = 0.2
"""Standard deviation of the embedding: small beside what the layers add, so that it is not all that they see."""
HEAD = 0.02
"""Of the head: at first all tokens are about as likely."""


def initial_params(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Float32 values of every parameter by its dotted name; each depends on the seed and its name alone.

    Matrices are normal, scaled by their fan-in; norms are 1; the queries of Attention Residuals and the router's bias
    are 0, so that at first all sublayers count alike and no expert is preferred. A KDA channel forgets between one
    part in a thousand and one in ten a token, evenly in logarithm.
    """
    values: dict[str, np.ndarray] = {}
    for name, (struct, _) in abstract_params(config).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values[name] = _values(name, struct.shape, config, rng).astype(np.float32)
    return values


def _values(name: str, shape: tuple[int, ...], config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    if name.endswith(".A_log"):
        return np.log(rng.uniform(1, 2, shape))
    if name.endswith(".dt_bias"):
        forgotten = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))
        bound = config.kda.gate_lower_bound
        # What the gate of `kimi_jax.ops.kda.log_decay` takes to it where exp(A_log) is 1.
        return np.log(np.expm1(forgotten)) if bound is None else np.log(forgotten / (-bound - forgotten))
    if name.endswith((".e_score_correction_bias", "_res_proj.weight", "norm.bias")):
        return np.zeros(shape)
    if "norm" in name.rpartition(".")[0].rpartition(".")[2]:
        return np.ones(shape)
    named = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    deviation = named.get(name, 1 / math.sqrt(shape[-1]))
    return rng.normal(0, deviation, shape)
