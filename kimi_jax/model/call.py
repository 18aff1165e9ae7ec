"""What one forward call knows about its tokens besides their ids."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class Call:
    """Places of the call's tokens.

    - `lengths`: `[B]` int32, real tokens of each row in this call; the rest of the row is padding.
    - `positions`: `[B, T]` int32, place of each token in its sequence.
    - `real`: `[B, T]`, False for padding.
    - `filled`: positions that any row holds after this call; a Python number where there is no cache.
    - `round`: in a loop over layers, which round it is: experts and latent caches are stacks then. None outside.
    """

    lengths: Int[Array, " B"]
    positions: Int[Array, "B T"]
    real: Bool[Array, "B T"]
    filled: Int[Array, ""] | int
    round: Int[Array, ""] | None = None


def make_call(tokens: int, lengths: Int[Array, " B"], before: Int[Array, " B"] | None) -> Call:
    """The `Call` of `tokens` padded places a row, `before` tokens of each row being in the cache (None: no cache)."""
    place = jnp.arange(tokens, dtype=lengths.dtype)[None, :]
    real = place < lengths[:, None]
    if before is None:
        return Call(lengths, jnp.broadcast_to(place, real.shape), real, tokens)
    filled = jnp.maximum(jnp.max(jnp.where(lengths > 0, before + lengths, 0)), 1)
    return Call(lengths, before[:, None] + place, real, filled)
