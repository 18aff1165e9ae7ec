"""One step of training adapters: loss, gradient of the adapters alone, update, and what the router did."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from kimi_jax.finetune.loss import next_token_loss
from kimi_jax.finetune.router_statistics import choices_of, router_drift, router_load
from kimi_jax.model.adapters import adapter_layout, join_params
from kimi_jax.model.lora import dropout
from kimi_jax.model.model import ModelSpec, Params, computing, nest
from kimi_jax.model.transformer import Output
from kimi_jax.parallel.sharding import array_sharding


class Tokens(NamedTuple):
    """A batch on the devices; see `kimi_jax.finetune.data`.

    - `tokens`, `targets`: ids, and the id to be predicted at each place.
    - `weights`: of each place in the loss.
    - `first`: place in the row where the token's document begins. `lengths`: real tokens a row.
    """

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    weights: Float[Array, "B T"]
    first: Int[Array, "B T"]
    lengths: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What changes from step to step.

    - `adapters`: nested dicts of float32 arrays, as in `Model.params`.
    - `optimizer`: optax's state, laid out as the adapters.
    - `step`: int32, steps done.
    """

    adapters: Params
    optimizer: Any
    step: Any


def state_layout(spec: ModelSpec, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, dtypes and shardings of a state, nothing allocated.

    An optimizer's arrays that stand under an adapter's name in its shape lie as it does, all others on every device.
    """
    whole = array_sharding("step", (), (), spec.mesh)
    adapters = nest({name: like for name, (like, _) in adapter_layout(spec).items()})
    known = dict(jax.tree.leaves_with_path(adapters))

    def place(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        owners = (known[path[at:]] for at in range(len(path)) if path[at:] in known)
        like = next(owners, None)
        at = like.sharding if like is not None and like.shape == x.shape else whole
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

    state = jax.tree.map_with_path(place, jax.eval_shape(optimizer.init, adapters))
    return TrainState(adapters, state, jax.ShapeDtypeStruct((), jnp.int32, sharding=whole))


def init_state(spec: ModelSpec, optimizer: optax.GradientTransformation, adapters: Params) -> TrainState:
    """The state before the first step."""
    places = jax.tree.map(lambda x: x.sharding, state_layout(spec, optimizer))
    opened = jax.jit(optimizer.init, out_shardings=places.optimizer)(adapters)
    return TrainState(adapters, opened, jax.device_put(jnp.zeros((), jnp.int32), places.step))


def batch_loss(
    spec: ModelSpec, base: Params, adapters: Params, batch: Tokens, key: Array | None = None, rate: float = 0.0
) -> tuple[Array, tuple[Array, ...]]:
    """The loss summed over the batch, in nats, and the experts `[B, T, A]` chosen in each layer that has some.

    Layers are computed again on the way back. `key` and `rate`: of the adapters' dropout.
    """
    with computing(spec), dropout(key, rate):
        module = spec.module(join_params(base, adapters))
        out: Output = module(batch.tokens, batch.lengths, observe=choices_of, remat=True, first=batch.first)
        total = next_token_loss(module, out.final_hidden, batch.targets, batch.weights)
    return total, tuple(x for x in out.observed if x is not None)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=5)
def train_step(
    spec: ModelSpec,
    optimizer: optax.GradientTransformation,
    rate: float,
    drift: bool,
    base: Params,
    state: TrainState,
    batch: Tokens,
    key: Array,
) -> tuple[TrainState, dict[str, Array]]:
    """One step.

    **Arguments:**

    - `spec`: of the model with adapters. `optimizer`: any of optax's, for the adapters alone.
    - `rate`: of the dropout. `key`: the run's random key; each step folds its number in.
    - `drift`: whether to compare the router's choices with those of the base, which costs a forward pass.
    - `base`: the parameters without adapters; never differentiated, never written.
    - `state`: donated.

    **Returns:** the next state, and scalars: `loss` (nats a predicted token), `tokens` (read), `predicted` (those that
    count in the loss), `gradient_norm`, and those of `router_load` and `router_drift`.
    """
    key = jax.random.fold_in(key, state.step)
    predicted = jnp.sum(batch.weights)

    def mean_loss(adapters: Params) -> tuple[Array, tuple[Array, ...]]:
        total, chosen = batch_loss(spec, base, adapters, batch, key, rate)
        return total / jnp.maximum(predicted, 1).astype(total.dtype), chosen

    (loss, chosen), gradient = jax.value_and_grad(mean_loss, has_aux=True)(state.adapters)
    updates, after = optimizer.update(gradient, state.optimizer, state.adapters)
    adapters = optax.apply_updates(state.adapters, updates)
    found = {"loss": loss, "tokens": jnp.sum(batch.lengths), "predicted": predicted}
    found["gradient_norm"] = optax.tree.norm(gradient)
    if chosen:
        real = jnp.arange(batch.tokens.shape[1])[None, :] < batch.lengths[:, None]
        found |= router_load(chosen, real, spec.config.moe.num_experts)
        if drift:
            found["router_drift"] = router_drift(chosen, base_choices(spec, base, batch), real)
    return TrainState(adapters, after, state.step + 1), found


def base_choices(spec: ModelSpec, base: Params, batch: Tokens) -> tuple[Array, ...]:
    """The experts that the model without adapters chooses."""
    plain = replace(spec, adapters=None)
    with computing(plain):
        out: Output = plain.module(base)(batch.tokens, batch.lengths, observe=choices_of, first=batch.first)
    return tuple(x for x in out.observed if x is not None)


@partial(jax.jit, static_argnums=0)
def evaluate_batch(spec: ModelSpec, base: Params, adapters: Params, batch: Tokens) -> tuple[Array, Array]:
    """The loss summed over a batch, in nats, and the sum of its weights."""
    return batch_loss(spec, base, adapters, batch)[0], jnp.sum(batch.weights)
