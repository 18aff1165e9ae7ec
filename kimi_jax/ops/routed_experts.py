"""The routed experts: sort token copies by expert, apply each expert's MLP to its rows, sum back by weight."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.grouped_matmul import ExpertWeights, grouped_matmul, num_experts
from kimi_jax.ops.norms import at_least_float32

Activate = Callable[[Array, Array], Array]
ADAPTER = ("lora_A", "lora_B", "lora_scale")
"""Names of what an adapter adds to a projection's arrays."""


def sorted_copies(expert: Int[Array, " M"]) -> tuple[Int[Array, " M"], Int[Array, " M"]]:
    """Which copy comes at each place when copies of tokens are sorted by expert, and the place of each copy."""
    order = jnp.argsort(expert, stable=True)
    return order, jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def copies_of(
    per_token: int, z: Float[Array, "T L"], order: Int[Array, " M"], back: Int[Array, " M"]
) -> Float[Array, "M L"]:
    """The rows of `z`, `per_token` copies of each, in the order of `sorted_copies`.

    The gradient of a row is gathered from its copies, where plain differentiation would scatter them.
    """
    return z[jax.lax.div(order, jnp.asarray(per_token, order.dtype))]


def _copies_forward(per_token: int, z: Array, order: Array, back: Array) -> tuple[Array, Array]:
    return copies_of(per_token, z, order, back), back


def _copies_backward(per_token: int, back: Array, gradient: Array) -> tuple[Array, None, None]:
    parts = gradient[back].reshape((-1, per_token, gradient.shape[-1]))
    return jnp.sum(at_least_float32(parts), axis=1).astype(gradient.dtype), None, None


copies_of.defvjp(_copies_forward, _copies_backward)


@jax.custom_vjp
def put_back(x: Float[Array, "M L"], order: Int[Array, " M"], back: Int[Array, " M"]) -> Float[Array, "M L"]:
    """What `copies_of` made, in the places that the copies came from; its gradient is gathered too."""
    return x[back]


put_back.defvjp(
    lambda x, order, back: (put_back(x, order, back), order), lambda order, gradient: (gradient[order], None, None)
)


def adapted_matmul(
    rows: Float[Array, "M I"], weights: ExpertWeights, group_sizes: Int[Array, " E"]
) -> Float[Array, "M O"]:
    """`grouped_matmul`, plus `lora_scale · B (A row)` of each row's own expert where `weights` has an adapter.

    **Arguments:**

    - `weights`: the projection as `grouped_matmul` takes it; with an adapter also `lora_A` `[E, r, I]` and `lora_B`
        `[E, O, r]` of this layer alone, no stacks of several, and the number `lora_scale`.

    **Returns:** the sums in `rows.dtype`, added up in float32 at least.

    Gradients go to the rows, to the adapter, and to the matrices as in `grouped_matmul`; those of experts without rows
    are zero.
    """
    out = grouped_matmul(rows, {name: x for name, x in weights.items() if name not in ADAPTER}, group_sizes)
    if "lora_A" not in weights:
        return out
    low = grouped_matmul(rows, {"weight": weights["lora_A"]}, group_sizes)
    change = at_least_float32(grouped_matmul(low, {"weight": weights["lora_B"]}, group_sizes))
    return (at_least_float32(out) + weights["lora_scale"].astype(change.dtype) * change).astype(out.dtype)


def routed_experts(
    z: Float[Array, "M L"],
    index: Int[Array, "M A"],
    weight: Float[Array, "M A"],
    experts: Mapping[str, ExpertWeights],
    first_expert: Int[Array, ""] | int,
    activate: Activate,
) -> Float[Array, "M L"]:
    """`Σ_a weight[a] · w2(act(w1 z, w3 z))` over the chosen experts that are held here.

    **Arguments:**

    - `z`: what the experts read.
    - `index`: chosen experts of each row, numbered over all devices; a number held nowhere is skipped
        (padding rows carry such a number).
    - `weight`: their weights.
    - `experts`: `w1` (gate), `w3` (up) and `w2` (down) of the experts `first_expert, first_expert + 1, …`, each as
        `adapted_matmul` takes it.
    - `activate`: the gated activation of (gate, up).

    **Returns:** the weighted sums, in float32 at least, added up in the order of `index`.
    """
    tokens, per_token = index.shape
    held = num_experts(experts["w1"])
    local = (index - first_expert).reshape(-1)
    local = jnp.where((local >= 0) & (local < held), local, held)
    order, back = sorted_copies(local)  # experts in order, the copies for those not held here last
    group_sizes = jnp.bincount(local, length=held + 1)[:held]
    rows = copies_of(per_token, z, order, back)
    hidden = activate(
        adapted_matmul(rows, experts["w1"], group_sizes), adapted_matmul(rows, experts["w3"], group_sizes)
    )
    out = at_least_float32(adapted_matmul(hidden, experts["w2"], group_sizes))
    copies = put_back(out, order, back).reshape((tokens, per_token, -1))
    return jnp.sum(copies * weight.astype(out.dtype)[..., None], axis=1)
