"""One sequence that grows: the cache is kept from turn to turn, and only new tokens are prefilled into it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kimi_jax.inference.arguments import cache_room, pad_tokens, token_array
from kimi_jax.inference.caches import init_cache
from kimi_jax.inference.functions import extend
from kimi_jax.inference.generate import PREFILL_PIECE
from kimi_jax.inference.sampling import Sampling, make_sampler
from kimi_jax.model.cache import Cache, KDACache
from kimi_jax.model.model import Model
from kimi_jax.parallel.distributed import fetch
from kimi_jax.parallel.mesh import axis_size


class ContextFullError(ValueError):
    """A sequence that has no room left."""


class _Mark(NamedTuple):
    """A place to come back to: what an answer changes, but for the latents, which it only adds to."""

    ids: list[int]
    logits: Array
    lengths: Array
    states: tuple[KDACache | None, ...]


class Conversation:
    """A cache of one sequence and the ids that it holds.

    - `ids`: those in the cache. A prompt that does not begin with all of them goes on behind the last prompt, whose
        KDA states are kept, where it begins with that; otherwise it starts again with an empty cache.
    - `room`: tokens that the sequence may have.
    - `prefilled`, `prefill_seconds`: tokens of the last prompt that were new, and how long they took.
    """

    def __init__(self, model: Model, room: int, sampling: Sampling | None = None) -> None:
        self.model = model
        self.room = room
        self.rows = axis_size(model.mesh, "data")
        self.sampler = make_sampler(sampling, 1, self.rows)
        self.prefilled, self.prefill_seconds = 0, 0.0
        self._clear()

    def draw_by(self, sampling: Sampling) -> None:
        """Draws from now on by `sampling`, for instance with another seed."""
        self.sampler = make_sampler(sampling, 1, self.rows)

    def _clear(self) -> None:
        self.ids: list[int] = []
        self._cache: Cache = init_cache(self.model, self.rows, cache_room(self.model.config, self.room))
        self._logits: Array | None = None
        self._mark: _Mark | None = None

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
        self._set_mark()
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
        if prompt[: len(self.ids)] != self.ids:
            if self._mark is not None and prompt[: len(self._mark.ids)] == self._mark.ids:
                self._go_back(self._mark)
            else:
                self._clear()
        held = len(self.ids)
        for start in range(held, len(prompt), PREFILL_PIECE):
            self._extend(prompt[start : start + PREFILL_PIECE])
        if self._logits is not None:
            self._logits.block_until_ready()
        self.prefilled, self.prefill_seconds = len(prompt) - held, time.perf_counter() - begun

    def _set_mark(self) -> None:
        assert self._logits is not None
        states = tuple(
            jax.tree.map(jnp.copy, layer) if isinstance(layer, KDACache) else None for layer in self._cache.layers
        )
        self._mark = _Mark(list(self.ids), self._logits, jnp.copy(self._cache.lengths), states)

    def _go_back(self, mark: _Mark) -> None:
        """The cache as it was at `mark`; latents behind its length are written over before they are read."""
        layers = tuple(
            layer if state is None else jax.tree.map(jnp.copy, state)
            for layer, state in zip(self._cache.layers, mark.states, strict=True)
        )
        self._cache = replace(self._cache, layers=layers, lengths=jnp.copy(mark.lengths))
        self._logits, self.ids = mark.logits, list(mark.ids)

    def _extend(self, ids: Sequence[int]) -> None:
        tokens = np.zeros((self.rows, len(ids)), np.int32)
        tokens[0] = ids
        lengths = np.zeros(self.rows, np.int32)
        lengths[0] = len(ids)
        try:
            self._logits, self._cache = extend(
                self.model.spec, self.model.params, pad_tokens(tokens), lengths, self._cache
            )
            self.ids.extend(ids)
        except BaseException:  # interrupted: the cache was given away, or is ahead of the ids
            self._clear()
            raise
