"""The router: which experts a token goes to, and with what weight."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.norms import along_last, at_least_float32


def router_scores(
    x: Float[Array, "*lead D"], weight: Float[Array, "E D"], score: Literal["sigmoid", "softmax"]
) -> Float[Array, "*lead E"]:
    """`σ(x·Wᵀ)` (or the softmax over all experts), float32 at least, at the highest matmul precision."""
    x = at_least_float32(x)
    logits = jnp.einsum("...d,ed->...e", x, weight.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)
    return jax.nn.sigmoid(logits) if score == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def choose_experts(
    scores: Float[Array, "M E"],
    bias: Float[Array, " E"],
    experts_per_token: int,
    num_groups: int = 1,
    top_groups: int = 1,
) -> Int[Array, "M A"]:
    """The experts of highest `score + bias`; of equal ones the lower number wins.

    With `num_groups > top_groups`, a group's score is the sum of its two best biased scores and only experts of
    the best `top_groups` groups can be chosen.
    """
    biased = scores + along_last(bias, scores)
    if num_groups > top_groups:
        grouped = biased.reshape((biased.shape[0], num_groups, -1))
        best_two, _ = jax.lax.top_k(grouped, 2)
        _, chosen = jax.lax.top_k(jnp.sum(best_two, axis=-1), top_groups)
        allowed = jnp.any(chosen[:, :, None] == jnp.arange(num_groups)[None, None, :], axis=1)
        # -inf and not 0: a biased score may be negative.
        biased = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(biased.shape)
    return jax.lax.top_k(biased, experts_per_token)[1]


def expert_weights(
    scores: Float[Array, "M E"], index: Int[Array, "M A"], renormalize: bool, scaling_factor: float
) -> Float[Array, "M A"]:
    """Weights of the chosen experts: their unbiased scores, `/ (Σ + 1e-20)` if so asked, times the factor."""
    weights = jnp.take_along_axis(scores, index, axis=1)
    if renormalize and index.shape[1] > 1:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return weights * scaling_factor
