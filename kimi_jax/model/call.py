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
    - `filled`: positions that any row holds after this call; None where there is no cache: all.
    - `first`: `[B, T]` int32, place in its row where each token's document begins; None for one document a row.
    - `round`: in a loop over layers, which round it is: experts and latent caches are stacks then. None outside.
    """

    lengths: Int[Array, " B"]
    positions: Int[Array, "B T"]
    real: Bool[Array, "B T"]
    filled: Int[Array, ""] | None
    first: Int[Array, "B T"] | None = None
    round: Int[Array, ""] | None = None


def make_call(
    tokens: int, lengths: Int[Array, " B"], before: Int[Array, " B"] | None, first: Int[Array, "B T"] | None = None
) -> Call:
    """The `Call` of `tokens` padded places a row, `before` tokens of each row being in the cache (None: no cache).

    `first`: place in its row where each token's document begins, never behind the token; padding may have anything.
    Only without a cache: `ValueError` with one.
    """
    place = jnp.arange(tokens, dtype=lengths.dtype)[None, :]
    real = place < lengths[:, None]
    if before is None:
        if first is not None:
            # Padding belongs to the last document: a row's state is then that document's, and no token sees nothing.
            last = jnp.take_along_axis(first, jnp.maximum(lengths - 1, 0)[:, None], axis=1)
            first = jnp.where(real, first, jnp.minimum(last, place))
        return Call(lengths, jnp.broadcast_to(place, real.shape), real, None, first)
    if first is not None:
        raise ValueError("first: several documents a row are for calls without a cache; leave out one of the two")
    filled = jnp.maximum(jnp.max(jnp.where(lengths > 0, before + lengths, 0)), 1)
    return Call(lengths, before[:, None] + place, real, filled)
