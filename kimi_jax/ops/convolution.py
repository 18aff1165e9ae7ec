"""The short causal convolutions in front of Kimi Delta Attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.norms import at_least_float32


def short_convolution(
    x: Float[Array, "B T P X"],
    weight: Float[Array, "P X taps"],
    tail: Float[Array, "B past P X"],
    lengths: Int[Array, " B"],
    since: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T P X"], Float[Array, "B past P X"]]:
    """Causal depthwise convolution followed by SiLU; the last tap multiplies the current token.

    The axis P holds the three convolutions (q, k, v) side by side, so that a split of the channels X over
    devices cuts each of them alike.

    **Arguments:**

    - `x`: the new inputs, right-padded.
    - `weight`: taps, oldest first.
    - `tail`: the `taps - 1` inputs before `x`, oldest first; zeros before the first token.
    - `lengths`: real tokens of each row.
    - `since`: place in `x` from which on a token sees anything: a tap that reaches before it reads zero. None: no
        such limit. The new tail knows no limits.

    **Returns:** the activations (in `x.dtype`; computed in float32) and the new tail: the last
    `taps - 1` *real* inputs of each row, so that padding leaves no trace and a row of length 0 is unchanged.
    """
    tokens, taps = x.shape[1], weight.shape[-1]
    window = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    wide = at_least_float32(window)
    kernel = at_least_float32(weight).astype(wide.dtype)

    def tap(j: int) -> Array:
        reached = wide[:, j : j + tokens]
        if since is not None:
            place = jnp.arange(tokens, dtype=since.dtype)[None, :] + (j + 1 - taps)
            reached = jnp.where((place >= since)[:, :, None, None], reached, 0)
        return reached * kernel[None, None, :, :, j]

    total = sum(tap(j) for j in range(taps))
    recent = lengths[:, None] + jnp.arange(taps - 1, dtype=lengths.dtype)[None, :]
    new_tail = jnp.take_along_axis(window, recent[:, :, None, None], axis=1)
    return jax.nn.silu(total).astype(x.dtype), new_tail.astype(tail.dtype)
