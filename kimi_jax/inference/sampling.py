"""Choosing the next token from logits, each row with its own settings and its own randomness."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the filters apply in the order written, to the tempered distribution.

    - `temperature`: divides the logits; 0 takes the most likely token (the lowest id of equals).
    - `top_k`: keep the k most likely tokens.
    - `top_p`: keep the fewest tokens whose probabilities sum to at least p.
    - `min_p`: keep tokens at least p times as likely as the most likely one.
    - `seed`: with a token's position it fixes the draw; rows of a batch do not influence each other.

    None leaves a filter out. The most likely token always stays.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses values outside their ranges."""
        ranges = {
            "temperature": (isfinite(self.temperature) and self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k is None or (int(self.top_k) == self.top_k >= 1), "a whole number of at least 1"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "between 0 and 1"),
            "seed": (int(self.seed) == self.seed and 0 <= self.seed < 2**32, "a whole number between 0 and 2³² − 1"),
        }
        for field in fields(self):
            fine, wanted = ranges[field.name]
            if not fine:
                raise ValueError(f"{field.name} must be {wanted}, found {getattr(self, field.name)}")


@dataclass(frozen=True)
class Sampler:
    """The settings of a batch as arrays, one entry a row."""

    rows: tuple[Sampling, ...]

    def __call__(
        self, logits: Float[Array | np.ndarray, "B W"], positions: Int[np.ndarray, " B"]
    ) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, " B"]]:
        """Draws one token a row.

        **Arguments:**

        - `logits`: of the next token; `positions`: the place it will have in its sequence.

        **Returns:** ids, their log-probabilities under the model (temperature 1, no filter), and whether the row's
        logits were all finite: where they were not, the id means nothing.
        """
        if all(row.temperature == 0 for row in self.rows):
            return _greedy(logits)
        width = logits.shape[-1]
        return _draw(
            logits,
            positions.astype(np.uint32),
            np.asarray([row.seed for row in self.rows], np.uint32),
            np.asarray([row.temperature for row in self.rows], np.float32),
            np.asarray([min(row.top_k or width, width) for row in self.rows], np.int32),
            np.asarray([1.0 if row.top_p is None else row.top_p for row in self.rows], np.float32),
            np.asarray([row.min_p or 0.0 for row in self.rows], np.float32),
        )


def make_sampler(sampling: Sampling | Sequence[Sampling] | None, prompts: int, batch: int) -> Sampler:
    """Settings of `batch` rows, of which the first `prompts` are real.

    **Raises:** `ValueError` where a list does not hold one entry a prompt.
    """
    if sampling is None or isinstance(sampling, Sampling):
        rows = [sampling or Sampling()] * prompts
    else:
        rows = list(sampling)
        if len(rows) != prompts:
            raise ValueError(f"{len(rows)} sampling settings for {prompts} prompts: give one, or one a prompt")
    return Sampler((*rows, *[Sampling()] * (batch - prompts)))


def _result(logits: Array, token: Array) -> tuple[Array, Array, Array]:
    logp = jax.nn.log_softmax(logits, axis=-1)
    return (
        token.astype(jnp.int32),
        jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0],
        jnp.all(jnp.isfinite(logits), axis=-1),
    )


@jax.jit
def _greedy(logits: Float[Array, "B W"]) -> tuple[Array, Array, Array]:
    return _result(logits, jnp.argmax(logits, axis=-1))


@jax.jit
def _draw(
    logits: Array,
    positions: Array,
    seeds: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
) -> tuple[Array, Array, Array]:
    token = jax.vmap(_draw_row)(logits.astype(jnp.float32), positions, seeds, temperature, top_k, top_p, min_p)
    return _result(logits, token)


def _draw_row(
    logits: Array, position: Array, seed: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array
) -> Array:
    width = logits.shape[0]
    order = jnp.argsort(-logits, stable=True)
    ranked = logits[order] / jnp.where(temperature > 0, temperature, 1)
    rank = jnp.arange(width)
    share = jax.nn.softmax(jnp.where(rank < top_k, ranked, -jnp.inf))
    before = jnp.cumsum(share) - share
    keep = (rank < top_k) & ((before < top_p) | (top_p >= 1)) & (share >= min_p * share[0])
    keep = keep | (rank == 0)
    noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (width,))
    best = jnp.argmax(jnp.where(keep, ranked + noise, -jnp.inf))
    return order[jnp.where(temperature > 0, best, 0)]
