"""Rows to the devices that serve them and back, with bounded buffers; inside `shard_map`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def exchange(
    serve: Callable[[Array, Array], Array],
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

    - `serve`: `serve(rows, tags)` on the receiving device: `capacity` rows, those with the tag `no_tag` being empty.
    - `rows`, `tags`: sorted by destination; those behind the counted ones stay here.
    - `counts`: rows for each device.
    - `capacity`: rows that a device receives at a time.
    - `axes`: mesh axes over which devices are numbered.
    - `native`: whether the backend has a ragged all-to-all (TPU and GPU do, the CPU does not).

    **Returns:** the results in the places of their rows, in the dtype of `serve`; zeros for rows that stayed.

    A receiver numbers its rows through, sender by sender; round r moves those from r·capacity on. The number of rounds
    is that of the device with the most rows, and the same on all.
    """
    me = jax.lax.axis_index(axes)
    # Every device learns how many rows go from where to where: n² numbers.
    table = jax.lax.all_gather(counts, axes)
    begin_of = jnp.cumsum(table, axis=1) - table  # [sender, receiver], at the sender
    place_of = jnp.cumsum(table, axis=0) - table  # [sender, receiver], in the receiver's numbering
    rounds = -(-jnp.max(jnp.sum(table, axis=0)) // capacity)
    kinds = jax.ShapeDtypeStruct((capacity,), tags.dtype)
    like = jax.eval_shape(serve, jax.ShapeDtypeStruct((capacity, rows.shape[1]), rows.dtype), kinds)
    done = jnp.zeros((rows.shape[0], like.shape[1]), like.dtype)

    def one_round(state: tuple[Array, Array]) -> tuple[Array, Array]:
        number, done = state
        low = jnp.maximum(place_of, number * capacity)
        high = jnp.minimum(place_of + table, (number + 1) * capacity)
        sizes = jnp.maximum(high - low, 0)
        at_sender = begin_of + low - place_of
        at_receiver = low - number * capacity
        out = _Offsets(at_sender, sizes, at_receiver, me, axes, native)
        received = out.move(rows, jnp.zeros((capacity, rows.shape[1]), rows.dtype))
        kinds = out.move(tags, jnp.full((capacity,), no_tag, tags.dtype))
        back = _Offsets(at_receiver.T, sizes.T, at_sender.T, me, axes, native)
        return number + 1, back.move(serve(received, kinds), done)

    return jax.lax.while_loop(lambda state: state[0] < rounds, one_round, (jnp.zeros((), rounds.dtype), done))[1]


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
