"""Text generation: prompts in, new token ids out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from kimi_jax.config import ModelConfig
from kimi_jax.inference.arguments import cache_room, pad_tokens, token_array
from kimi_jax.inference.caches import init_cache
from kimi_jax.inference.functions import extend
from kimi_jax.inference.sampling import Sampling, make_sampler
from kimi_jax.model.model import Model
from kimi_jax.parallel.distributed import fetch
from kimi_jax.parallel.mesh import axis_size

PREFILL_PIECE = 2048
"""A longer prompt is prefilled in pieces of this many tokens, so that memory does not grow with it."""


OnToken = Callable[[int, int], None]
"""Called with the prompt's number and a new token id as soon as it is known."""

FinishReason = Literal["stop", "length", "error"]


class Generations(list[list[int]]):
    """The new token ids of each prompt, without the stop id: a list of lists that knows a little more.

    - `finish_reasons`: `"stop"` (a stop id came), `"length"` (`max_new_tokens` reached) or `"error"`, one a prompt.
    - `errors`: what went wrong with a prompt, otherwise None.
    - `logprobs`: log-probabilities of the new ids under the model, in nats, where asked for; otherwise None.
    """

    finish_reasons: list[FinishReason]
    errors: list[str | None]
    logprobs: list[list[float]] | None

    def __init__(self, rows: "list[_Row]", logprobs: bool) -> None:
        super().__init__(row.ids for row in rows)
        self.finish_reasons = [row.finish or "length" for row in rows]
        self.errors = [row.error for row in rows]
        self.logprobs = [row.logprobs for row in rows] if logprobs else None


@dataclass
class _Row:
    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop_ids: Sequence[int] | None = None,
    logprobs: bool = False,
    on_token: OnToken | None = None,
    latent_dtype: DTypeLike | None = None,
) -> Generations:
    """Continues any number of prompts together.

    **Arguments:**

    - `prompts`: token ids, at least one each; lengths may differ.
    - `max_new_tokens`: bound on the new ids of each prompt.
    - `sampling`: one setting for all, or a list with one a prompt; greedy by default.
    - `stop_ids`: ids that end a row; None means the model's (`model.stop_ids`), `[]` none.
    - `logprobs`: also return the log-probability of each new id.
    - `on_token`: called with (prompt number, id) for each new id, in order.
    - `latent_dtype`: of the latent cache, as `init_cache` takes it.

    **Returns:** the new ids, without the stop id; see `Generations`. A row whose logits are not finite ends there
    with an error, the others go on.

    **Raises:** `ValueError` before anything runs: an empty prompt, an id outside the vocabulary, or a prompt that
    together with `max_new_tokens` is longer than the model's context.
    """
    prompts = list(prompts)
    check_prompts(model.config, prompts, max_new_tokens)
    stops = model.stop_ids if stop_ids is None else tuple(token_array(model.config, list(stop_ids), 1).tolist())
    rows = [_Row(prompt) for prompt in prompts]
    longest = max((len(prompt) for prompt in prompts), default=0)
    data = axis_size(model.mesh, "data")
    batch = -(-len(rows) // data) * data
    sampler = make_sampler(sampling, len(rows), batch)
    if not rows or max_new_tokens == 0:
        return Generations(rows, logprobs)

    lengths = np.zeros(batch, np.int32)
    lengths[: len(rows)] = [len(row.prompt) for row in rows]
    tokens = np.zeros((batch, longest), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row.prompt)] = row.prompt
    # Sizes of the cache are rounded up too: they are part of what is compiled.
    capacity = cache_room(model.config, longest + max_new_tokens)
    cache = init_cache(model, batch, capacity, latent_dtype)
    logits: Array | None = None
    for start in range(0, longest, PREFILL_PIECE):
        piece = tokens[:, start : start + PREFILL_PIECE]
        counts = np.clip(lengths - start, 0, piece.shape[1]).astype(np.int32)
        part, cache = extend(model.spec, model.params, pad_tokens(piece), counts, cache)
        logits = part if logits is None else _later(counts > 0, part, logits)
    assert logits is not None

    positions = lengths.copy()
    for _ in range(max_new_tokens):
        token, logp, finite = fetch(sampler(logits, positions))
        for i, row in enumerate(rows):
            if row.finish is None:
                _advance(row, int(token[i]), float(logp[i]), bool(finite[i]), stops)
                if row.finish is None and on_token is not None:
                    on_token(i, row.ids[-1])
                if row.finish is None and len(row.ids) == max_new_tokens:
                    row.finish = "length"
        active = np.asarray([row.finish is None for row in rows] + [False] * (batch - len(rows)))
        if not active.any():
            break
        logits, cache = extend(model.spec, model.params, token[:, None], active.astype(np.int32), cache)
        positions = positions + active
    return Generations(rows, logprobs)


@jax.jit
def _later(rows: Array, part: Array, logits: Array) -> Array:
    return jnp.where(rows[:, None], part, logits)


def _advance(row: _Row, token: int, logp: float, finite: bool, stops: tuple[int, ...]) -> None:
    if not finite:
        # The most likely of all-NaN logits would be id 0, for ever.
        row.finish, row.error = (
            "error",
            f"the logits after {len(row.prompt) + len(row.ids)} tokens are not finite",
        )
    elif token in stops:
        row.finish = "stop"
    else:
        row.ids.append(token)
        row.logprobs.append(logp)


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """What `generate` refuses before it runs; the configuration suffices, so that commands ask before loading."""
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, found {max_new_tokens}")
    for i, prompt in enumerate(prompts):
        if np.ndim(prompt) != 1:
            raise ValueError(f"prompt {i} must be a list of token ids, found {prompt!r}")
        if len(prompt) == 0:
            raise ValueError(f"prompt {i} is empty: give at least one token")
        token_array(config, prompt, 1)
        total, limit = len(prompt) + max_new_tokens, config.max_positions
        if total > limit:
            raise ValueError(
                f"prompt {i}: {len(prompt)} tokens and {max_new_tokens} new ones make {total}, "
                f"the model's context is {limit}"
            )
