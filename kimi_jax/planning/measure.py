"""Measuring a loaded model where it lies: rates of prefill and decode, time by part, the machine's own bandwidth."""

import gzip
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kimi_jax.inference.arguments import bucket, cache_room
from kimi_jax.inference.caches import init_cache
from kimi_jax.inference.functions import decode, extend, prefill
from kimi_jax.model.cache import Cache
from kimi_jax.model.model import Model, flatten
from kimi_jax.model.parts import PARTS
from kimi_jax.parallel.mesh import axis_size
from kimi_jax.planning.program import Program
from kimi_jax.planning.roofline import decode_steps

PROBE_BYTES = 2**28
"""Bytes of the array that `bandwidth` reads and writes."""
DECODED = 16
"""Steps that are decoded to find the fastest."""


@dataclass(frozen=True)
class Rate:
    """What a call took: seconds of the fastest of several, and the tokens that it adds."""

    batch: int
    context: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows."""
        return self.tokens / self.seconds


def measure_prefill(model: Model, length: int, repeats: int = 3) -> Rate:
    """One prompt of `length` random tokens for each part of the mesh axis `data`, in one call, from an empty cache."""
    batch = axis_size(model.mesh, "data")
    tokens = _tokens(model, batch, length)

    def call(cache: Cache) -> tuple[Any, Cache]:
        return prefill(model, tokens, [length] * batch, cache)

    seconds = min(_timed(call, _filled(model, batch, 0, length))[0] for _ in range(repeats + 1))
    return Rate(batch, 0, batch * length, seconds)


def measure_decode(model: Model, batch: int, context: int) -> Rate:
    """One token for each of `batch` rows that hold `context` tokens: the fastest of `DECODED` steps.

    The cache is filled with zeros: time does not depend on what lies there.
    """
    state = _filled(model, batch, context, 1)
    tokens = _tokens(model, batch, 1)[:, 0]
    seconds = []
    for _ in range(DECODED):
        took, state = _timed(lambda before: decode(model, tokens, before), state)
        seconds.append(took)
    return Rate(batch, context, batch, min(seconds))


def floor_bytes(model: Model, batch: int, context: int) -> int:
    """Bytes that a decode step must move over all devices: weights used, state twice, the filled cache once."""
    dense = experts = 0
    for name, array in flatten(model.params):
        if ".experts." in name:
            experts += array.nbytes
        elif model.config.tie_embeddings or not name.startswith("embed_tokens."):
            dense += array.nbytes
    (step,) = decode_steps(model.config, [batch], context)
    wide = model.dtype.itemsize / 2  # the roofline counts a cache in bfloat16
    return round(dense + step.touched * experts + step.state_bytes + wide * step.cache_bytes)


def bandwidth(model: Model) -> float:
    """Bytes a second that the model's devices together read and write, measured with one large array."""
    count = 1 if model.mesh is None else model.mesh.size
    whole = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec(model.mesh.axis_names))
    x = jax.jit(partial(jnp.zeros, (count, PROBE_BYTES // 4), jnp.float32), out_shardings=whole)()
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    seconds = []
    for _ in range(5):
        took, x = _timed(lambda before: (add(before),) * 2, x)
        seconds.append(took)
    return 2 * x.nbytes / min(seconds)


def time_by_part(
    model: Model, batch: int, context: int, tokens: int, directory: Path | None = None
) -> dict[str, float]:
    """Seconds of a call by part of the model (`kimi_jax.model.parts`), from a profile of its operations.

    **Arguments:**

    - `batch`, `context`: rows, and the tokens that each holds. `tokens`: new ones a row, 1 for a decode step.
    - `directory`: where the profile is kept (for xprof); otherwise it is thrown away.

    Seconds of all devices that the profile saw, over their number. Operations that run at the same time count each for
    itself, and waiting for another device counts as the exchange it is: the sum may exceed the call's time.
    """
    ids, lengths = _tokens(model, batch, tokens), [tokens] * batch
    _timed(lambda before: prefill(model, ids, lengths, before), _filled(model, batch, context, tokens))
    state = _filled(model, batch, context, tokens)
    padded = np.zeros((batch, bucket(tokens)), np.int32)
    lowered = extend.lower(model.spec, model.params, padded, np.ones(batch, np.int32), state)
    parts = _part_of_operation(lowered.compile().as_text() or "")
    with tempfile.TemporaryDirectory() as scratch:
        kept = directory or Path(scratch)
        with jax.profiler.trace(str(kept)):
            _timed(lambda before: prefill(model, ids, lengths, before), state)
        file = max(kept.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        with gzip.open(file) as stream:
            events = json.load(stream)["traceEvents"]
    found: dict[str, float] = defaultdict(float)
    devices = set()
    for event in events:
        told = event.get("args") or {}
        name = told.get("hlo_op", event.get("name", ""))  # a GPU's kernels have names of their own
        if event.get("ph") == "X" and name in parts:
            devices.add((event.get("pid"), told.get("device_ordinal")))
            found[parts[name]] += event["dur"] / 1e6
    return {name: took / len(devices) for name, took in sorted(found.items(), key=lambda entry: -entry[1])}


def _part_of_operation(text: str) -> dict[str, str]:
    """The part of the model that each operation of a compiled program belongs to."""
    found = {}
    scope = re.compile(r'op_name="([^"]*)"')
    for _, one in Program(text).instructions():
        if one.opcode in ("while", "conditional", "call"):
            continue  # what they run is counted by itself
        names = scope.search(one.attributes)
        inside = [part for part in (names[1].split("/") if names else []) if part in PARTS]
        found[one.name] = inside[-1] if inside else "other"
    return found


def _tokens(model: Model, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, length))


def _filled(model: Model, batch: int, context: int, tokens: int) -> Cache:
    """A cache with `context` tokens a row, zeros all, and room for a call of `tokens` or `DECODED` steps."""
    cache = init_cache(model, batch, cache_room(model.config, context + (DECODED if tokens == 1 else tokens)))
    return replace(cache, lengths=_full(cache.lengths.sharding)(cache.lengths, context))


@cache
def _full(sharding: Any) -> Callable[[Any, int], Any]:
    return jax.jit(jnp.full_like, out_shardings=sharding)


def _timed(call: Callable[[Any], tuple[Any, Any]], argument: Any) -> tuple[float, Any]:
    """Seconds of a call that takes a state and returns something and the next one; the next one."""
    jax.block_until_ready(argument)
    start = time.perf_counter()
    out = jax.block_until_ready(call(argument))
    return time.perf_counter() - start, out[1]
