"""Rows to the devices that serve them and back, with bounded buffers; inside `shard_map`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.ops.norms import wide_dtype

Serve = Callable[[Any, Array, Array], Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6, 7, 8))
def exchange(
    serve: Serve,
    params: Any,
    rows: Float[Array, "M L"],
    tags: Int[Array, " M"],
    counts: Int[Array, " n"],
    capacity: int,
    no_tag: int,
    axes: tuple[str, ...],
    native: bool,
) -> Float[Array, "M L"]:
    """`serve` applied to every row on the device it is meant for.

    **Arguments:**

    - `serve`: `serve(params, rows, tags)` on the receiving device: `capacity` rows, those with the tag `no_tag` being
        empty. It must close over no array that a gradient is wanted of.
    - `params`: a tree of the receiving device's own arrays.
    - `rows`, `tags`: sorted by destination; those behind the counted ones stay here.
    - `counts`: rows for each device.
    - `capacity`: rows that a device receives at a time.
    - `axes`: mesh axes over which devices are numbered.
    - `native`: whether the backend has a ragged all-to-all (TPU and GPU do, the CPU does not).

    **Returns:** the results in the places of their rows, in the dtype of `serve`; zeros for rows that stayed.

    A receiver numbers its rows through, sender by sender; round r moves those from r·capacity on. The number of rounds
    is that of the device with the most rows, and the same on all.

    Gradients go to `rows` and to the floating arrays of `params`, by way of as many rounds again. Forward-mode
    derivatives are not defined.
    """
    rounds = _Rounds(counts, capacity, axes, native)
    kinds = jax.ShapeDtypeStruct((capacity,), tags.dtype)
    like = jax.eval_shape(serve, params, jax.ShapeDtypeStruct((capacity, rows.shape[1]), rows.dtype), kinds)
    done = jnp.zeros((rows.shape[0], like.shape[1]), like.dtype)

    def one_round(state: tuple[Array, Array]) -> tuple[Array, Array]:
        number, done = state
        out, back = rounds.offsets(number)
        received = out.move(rows, jnp.zeros((capacity, rows.shape[1]), rows.dtype))
        kinds = out.move(tags, jnp.full((capacity,), no_tag, tags.dtype))
        return number + 1, back.move(serve(params, received, kinds), done)

    return jax.lax.while_loop(rounds.left, one_round, (rounds.first, done))[1]


def _forward(
    serve: Serve,
    params: Any,
    rows: Array,
    tags: Array,
    counts: Array,
    capacity: int,
    no_tag: int,
    axes: tuple[str, ...],
    native: bool,
) -> tuple[Array, tuple[Any, ...]]:
    return exchange(serve, params, rows, tags, counts, capacity, no_tag, axes, native), (params, rows, tags, counts)


def _backward(
    serve: Serve,
    capacity: int,
    no_tag: int,
    axes: tuple[str, ...],
    native: bool,
    kept: tuple[Any, ...],
    gradient: Array,
) -> tuple[Any, ...]:
    """Rows travel again, each with the gradient of its result; what comes back is the gradient of the row.

    Moved: what the forward rounds move, and the gradients of the results once.
    """
    params, rows, tags, counts = kept
    rounds = _Rounds(counts, capacity, axes, native)
    floating = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, params)

    def one_round(state: tuple[Array, Any, Array]) -> tuple[Array, Any, Array]:
        number, to_params, to_rows = state
        out, back = rounds.offsets(number)
        received = out.move(rows, jnp.zeros((capacity, rows.shape[1]), rows.dtype))
        kinds = out.move(tags, jnp.full((capacity,), no_tag, tags.dtype))
        pull = out.move(gradient, jnp.zeros((capacity, gradient.shape[1]), gradient.dtype))

        def served(floating: Any, received: Array) -> Array:
            own = jax.tree.map(lambda x, new: x if new is None else new, params, floating)
            return serve(own, received, kinds)

        of_params, of_rows = jax.vjp(served, floating, received)[1](pull)
        to_params = jax.tree.map(lambda total, x: total + x.astype(total.dtype), to_params, of_params)
        return number + 1, to_params, back.move(of_rows, to_rows)

    totals = jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), floating)
    start = (rounds.first, totals, jnp.zeros_like(rows))
    _, totals, to_rows = jax.lax.while_loop(rounds.left, one_round, start)
    return jax.tree.map(lambda x, total: total.astype(x.dtype), floating, totals), to_rows, None, None


exchange.defvjp(_forward, _backward)


class _Rounds:
    """What goes where in each round, and how many rounds there are: the same on all devices."""

    def __init__(self, counts: Array, capacity: int, axes: tuple[str, ...], native: bool) -> None:
        self.capacity, self.axes, self.native = capacity, axes, native
        self.me = jax.lax.axis_index(axes)
        # Every device learns how many rows go from where to where: n² numbers.
        self.table = jax.lax.all_gather(counts, axes)
        self.begin_of = jnp.cumsum(self.table, axis=1) - self.table  # [sender, receiver], at the sender
        self.place_of = jnp.cumsum(self.table, axis=0) - self.table  # [sender, receiver], in the receiver's numbering
        self.count = -(-jnp.max(jnp.sum(self.table, axis=0)) // capacity)
        self.first = jnp.zeros((), self.count.dtype)

    def left(self, state: tuple[Any, ...]) -> Array:
        """Whether there is a round `state[0]`."""
        return state[0] < self.count

    def offsets(self, number: Array) -> tuple["_Offsets", "_Offsets"]:
        """Of round `number`: the way to the receivers, and the way back."""
        low = jnp.maximum(self.place_of, number * self.capacity)
        high = jnp.minimum(self.place_of + self.table, (number + 1) * self.capacity)
        sizes = jnp.maximum(high - low, 0)
        at_sender = self.begin_of + low - self.place_of
        at_receiver = low - number * self.capacity
        out = _Offsets(at_sender, sizes, at_receiver, self.me, self.axes, self.native)
        back = _Offsets(at_receiver.T, sizes.T, at_sender.T, self.me, self.axes, self.native)
        return out, back


class _Offsets:
    """One ragged all-to-all: `[sender, receiver]` tables of where rows lie, how many, and where they go."""

    def __init__(
        self, start: Array, sizes: Array, place: Array, me: Array, axes: tuple[str, ...], native: bool
    ) -> None:
        self.start, self.sizes, self.place = start, sizes, place
        self.me, self.axes, self.native = me, axes, native

    def move(self, operand: Array, output: Array) -> Array:
        """`output` with the rows that others send put in their places. Moved: the rows that `sizes` counts."""
        if not self.native:
            return self._move_here(operand, output)
        return jax.lax.ragged_all_to_all(
            operand,
            output,
            self.start[self.me],
            self.sizes[self.me],
            self.place[self.me],
            self.sizes[:, self.me],
            axis_name=self.axes,
        )

    def _move_here(self, operand: Array, output: Array) -> Array:
        """The same where the backend has no ragged all-to-all: every row to every device, the right ones picked."""
        everything = jax.lax.all_gather(operand, self.axes)
        start, sizes, place = self.start[:, self.me], self.sizes[:, self.me], self.place[:, self.me]
        number = jnp.arange(output.shape[0], dtype=place.dtype)
        inside = (number[:, None] >= place[None, :]) & (number[:, None] < (place + sizes)[None, :])
        sender = jnp.argmax(inside, axis=1)
        row = jnp.clip(start[sender] + number - place[sender], 0, operand.shape[0] - 1)
        picked = everything[sender, row]
        mask = jnp.any(inside, axis=1).reshape((-1, *(1,) * (output.ndim - 1)))
        return jnp.where(mask, picked, output)
