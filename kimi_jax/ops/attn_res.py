"""Attention Residuals: a learned mix of the residual stream's saved block sums."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_jax.ops.norms import along_last, at_least_float32


def mix_residuals(
    prefix: Float[Array, "B T D"],
    bank: Sequence[Float[Array, "B T D"]],
    proj: Float[Array, " D"],
    norm: Float[Array, " D"],
    eps: float,
) -> Float[Array, "B T D"]:
    """`Σ softmax(score)·v` over v = bank, then prefix, with `score = Σ_D v·rsqrt(mean(v²)+eps)·(norm·proj)`.

    The entries are weighed by their normalised selves and mixed as they are. Scores, softmax and sum in
    float32, the result in the dtype of `prefix`.
    """
    entries = [at_least_float32(entry) for entry in (*bank, prefix)]
    weight = norm.astype(entries[0].dtype) * proj.astype(entries[0].dtype)

    def score(entry: Array) -> Array:
        unit = entry * jax.lax.rsqrt(jnp.mean(entry * entry, axis=-1, keepdims=True) + eps)
        return jnp.sum(unit * along_last(weight, unit), axis=-1, keepdims=True)

    shares = jax.nn.softmax(jnp.stack([score(entry) for entry in entries]), axis=0)
    mixed = sum(share * entry for share, entry in zip(shares, entries, strict=True))
    return mixed.astype(prefix.dtype)
