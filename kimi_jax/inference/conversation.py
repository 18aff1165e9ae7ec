"""One sequence that grows: the cache is kept from turn to turn, and only new tokens are prefilled into it."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Array

from kimi_jax.inference.arguments import cache_room, pad_tokens, token_array
from kimi_jax.inference.caches import init_cache
from kimi_jax.inference.functions import extend
from kimi_jax.inference.generate import PREFILL_PIECE
from kimi_jax.inference.sampling import Sampling, make_sampler
from kimi_jax.model.model import Model
from kimi_jax.parallel.distributed import fetch
from kimi_jax.parallel.mesh import axis_size


class ContextFullError(ValueError):
    """A sequence that has no room left."""


class Conversation:
    """A cache of one sequence and the ids that it holds.

    - `ids`: those in the cache. KDA states cannot be taken back: a prompt that does not begin with all of them starts
        again with an empty cache.
    - `room`: tokens that the sequence may have.
    - `prefilled`, `prefill_seconds`: tokens of the last prompt that were new, and how long they took.
    """

    def __init__(self, model: Model, room: int, sampling: Sampling | None = None) -> None:
        self.model = model
        self.room = cache_room(model.config, room)
        self.rows = axis_size(model.mesh, "data")
        self.sampler = make_sampler(sampling, 1, self.rows)
        self.prefilled, self.prefill_seconds = 0, 0.0
        self._clear()

    def draw_by(self, sampling: Sampling) -> None:
        """Draws from now on by `sampling`, for instance with another seed."""
        self.sampler = make_sampler(sampling, 1, self.rows)

    def _clear(self) -> None:
        self.ids: list[int] = []
        self._cache = init_cache(self.model, self.rows, self.room)
        self._logits: Array | None = None

    def answer(
        self, prompt: Sequence[int], stop_ids: Sequence[int], max_new_tokens: int | None = None
    ) -> Iterator[int]:
        """Continues `prompt`: yields new ids, a stop id as the last one, until `max_new_tokens` or the room's end.

        Ids that were yielded are in the cache or will be with the next prompt that begins with them. The caller may
        stop asking at any time.

        **Raises:** `ContextFullError` where the prompt leaves no room, `ValueError` for an empty prompt or an id
        outside the vocabulary, `FloatingPointError` where logits are not finite.
        """
        self.prefilled, self.prefill_seconds = 0, 0.0
        ids: list[int] = token_array(self.model.config, list(prompt), 1).tolist()
        if not ids:
            raise ValueError("a prompt needs at least one token")
        if len(ids) >= self.room:
            raise ContextFullError(f"the prompt has {len(ids)} tokens, there is room for {self.room}")
        self._take(ids)
        count = 0
        while count != max_new_tokens:
            assert self._logits is not None
            token, _, finite = fetch(self.sampler(self._logits, np.full(self.rows, len(self.ids), np.int32)))
            if not finite[0]:
                raise FloatingPointError(f"the logits after {len(self.ids)} tokens are not finite")
            new = int(token[0])
            yield new
            count += 1
            if new in stop_ids or count == max_new_tokens or len(self.ids) + 1 >= self.room:
                return
            self._extend([new])

    def _take(self, prompt: list[int]) -> None:
        """Prefills what of `prompt` is not in the cache yet."""
        begun = time.perf_counter()
        held = len(self.ids)
        if prompt[:held] != self.ids or (held == len(prompt) and self._logits is None):
            self._clear()
            held = 0
        for start in range(held, len(prompt), PREFILL_PIECE):
            self._extend(prompt[start : start + PREFILL_PIECE])
        if self._logits is not None:
            self._logits.block_until_ready()
        self.prefilled, self.prefill_seconds = len(prompt) - held, time.perf_counter() - begun

    def _extend(self, ids: Sequence[int]) -> None:
        tokens = np.zeros((self.rows, len(ids)), np.int32)
        tokens[0] = ids
        lengths = np.zeros(self.rows, np.int32)
        lengths[0] = len(ids)
        try:
            self._logits, self._cache = extend(
                self.model.spec, self.model.params, pad_tokens(tokens), lengths, self._cache
            )
        except BaseException:  # interrupted: the cache was given away
            self._clear()
            raise
        self.ids.extend(ids)
