"""What lies on each device of a mesh: weights, conversations and temporaries, by the table of shardings.

No device is needed: shapes come from the configuration, splits from `parallel/sharding.py`.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import cache_layout
from kimi_jax.model.model import abstract_params
from kimi_jax.ops.indexer import QUERY_BLOCK
from kimi_jax.parallel.mesh import MESH_AXES, MeshError
from kimi_jax.parallel.sharding import TABLE, Axes, partition_spec

PREFILL_PIECE = 1024
"""Tokens a row that the allowance for temporaries counts with; longer prompts can be given in pieces of it."""
_WHOLE = "whole on every device"


@dataclass(frozen=True)
class Placement:
    """The model and its conversations on a mesh, in bytes of one device unless it says otherwise.

    - `mesh`: size of every mesh axis.
    - `weights`: by how they are split ("whole on every device", "split over tensor", …); text model only, the vision
        tower is not loaded.
    - `stored`: the same weights once, over all devices. `copied`: what the copies of them cost, over all devices.
    - `groups`: groups of devices that hold different conversations.
    - `conversation`: a conversation of `context` tokens, for a device of the group that holds it.
    """

    config: ModelConfig
    mesh: Mapping[str, int]
    context: int
    weights: Mapping[str, int]
    stored: int
    groups: int
    conversation: int

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def weight_bytes(self) -> int:
        """Weights that a device holds."""
        return sum(self.weights.values())

    @property
    def copied(self) -> int:
        """Bytes over all devices beyond one copy of each weight."""
        return self.weight_bytes * self.devices - self.stored

    def temporaries(self, rows: int) -> int:
        """See `temporary_bytes`; `rows` conversations a group."""
        return temporary_bytes(self.config, self.mesh, rows, self.context)

    def total(self, rows: int) -> int:
        """Bytes of a device when each group holds `rows` conversations."""
        return self.weight_bytes + rows * self.conversation + self.temporaries(rows)

    def conversations(self, memory: int) -> int:
        """Conversations that all devices together hold when each has `memory` bytes."""
        most = max(0, memory - self.weight_bytes) // self.conversation
        return self.groups * bisect_right(range(1, most + 1), memory, key=self.total)


def place(config: ModelConfig, mesh: Mapping[str, int], context: int, dense_weights: str = "bf16") -> Placement:
    """What every device of a mesh holds.

    **Arguments:**

    - `mesh`: sizes by axis, an axis left out has size 1.
    - `context`: tokens of a conversation.
    - `dense_weights`: as `load_model` takes it.

    **Raises:** `MeshError` for an unknown axis, or naming the array, the axis and both numbers where a size does not
    divide.
    """
    check_axes(mesh)
    return _place(config, tuple(mesh.get(name, 1) for name in MESH_AXES), context, dense_weights)


def check_axes(mesh: Mapping[str, int]) -> None:
    """Refuses axes that no mesh has, with a `MeshError`."""
    for name in mesh:
        if name not in MESH_AXES:
            raise MeshError(f"unknown mesh axis {name!r}; the axes are {', '.join(MESH_AXES)}")


def best_placement(config: ModelConfig, devices: int, memory: int, context: int, batch: int | None = None) -> Placement:
    """The placement over `devices` that holds most conversations of `context` tokens in `memory` bytes a device.

    Of several, the one whose devices hold least with one conversation a group. With `batch`, only meshes are tried
    whose groups divide it.

    **Raises:** `MeshError` where no mesh over so many devices divides the model.
    """
    found: list[Placement] = []
    why: MeshError | None = None
    for mesh in meshes(devices):
        groups = _ways(mesh, "batch")
        if batch is not None and batch % groups:
            why = why or MeshError(f"batch {batch} cannot be split over {groups} groups of devices")
            continue
        try:
            found.append(place(config, mesh, context))
        except MeshError as error:
            why = error
    if not found:
        raise MeshError(f"no mesh over {devices} devices divides the model ({why})")
    return max(found, key=lambda placement: (placement.conversations(memory), -placement.total(1)))


def meshes(devices: int) -> Iterator[dict[str, int]]:
    """Every mesh over `devices` devices."""

    def split(left: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: left}
            return
        for size in (size for size in range(1, left + 1) if left % size == 0):
            for rest in split(left // size, axes[1:]):
                yield {axes[0]: size, **rest}

    return split(devices, MESH_AXES)


def temporary_bytes(config: ModelConfig, mesh: Mapping[str, int], rows: int, context: int) -> int:
    """An allowance for what a step needs besides weights and cache, in bytes of one device.

    The larger of decoding `rows` tokens and prefilling `PREFILL_PIECE` of one row, with one layer's buffers alive:

    - residuals: the bank of Attention Residuals and the running sum, in bfloat16 and once in float32;
    - attention: five arrays of all head channels in float32 (queries, keys, values, gates, output);
    - routed experts: a copy of each token for each of its experts, for all tokens of the devices that share the
        experts: what they read and w1, w3 and their product in bfloat16, what they give in float32, twice;
    - logits of `rows` in float32, twice;
    - with an indexer: scores of `QUERY_BLOCK` tokens (or of `rows`) over the context in float32, three times.

    What a compiler really takes is told by compiling; what the run-time keeps for itself is not in it.
    """
    tokens = max(PREFILL_PIECE, rows)
    bank = 1 if config.attn_res_block_size is None else -(-config.num_layers // config.attn_res_block_size)
    residuals = tokens * config.hidden_size * (bank + 1) * (2 + 4)
    channels = max(config.kda.num_heads * config.kda.head_dim, config.mla.num_heads * config.mla.latent_dim)
    attention = 5 * 4 * tokens * (channels // _ways(mesh, "heads"))
    copies = tokens * _ways(mesh, "batch") * config.moe.experts_per_token
    experts = copies * (2 * config.expert_input + 3 * 2 * config.moe.expert_width + 2 * 4 * config.expert_input)
    logits = 2 * 4 * rows * (config.vocab_size // _ways(mesh, "vocab"))
    scores = 0 if config.indexer is None else 3 * 4 * max(QUERY_BLOCK, rows) * context
    return residuals + max(attention + scores, experts) + logits


@cache
def _place(config: ModelConfig, sizes: tuple[int, ...], context: int, dense_weights: str) -> Placement:
    """See `place`; `sizes` in the order of `MESH_AXES`."""
    weights, stored = _weights(config, sizes, dense_weights)
    abstract = AbstractMesh(sizes, MESH_AXES)
    groups = _ways(abstract.shape, "batch")
    layout, axes = cache_layout(config, jnp.dtype(jnp.bfloat16), batch=groups, max_len=context)
    arrays = Counter(
        (field.name, array.shape, array.dtype)
        for layer in layout.layers
        for field in fields(layer)
        if (array := getattr(layer, field.name)) is not None
    )
    conversation = sum(
        count * _split(name, jax.ShapeDtypeStruct(shape, dtype), axes[name], abstract)[1]
        for (name, shape, dtype), count in arrays.items()
    )
    mesh = dict(zip(MESH_AXES, sizes, strict=True))
    return Placement(config, mesh, context, dict(weights), stored, groups, conversation)


@cache
def _weights(
    config: ModelConfig, sizes: tuple[int, ...], dense_weights: str
) -> tuple[tuple[tuple[str, int], ...], int]:
    """Bytes a device by how they are split, and bytes in all."""
    mesh = AbstractMesh(sizes, MESH_AXES)
    by_split: Counter[str] = Counter()
    stored = 0
    for (shape, dtype, axes), (name, count) in _kinds(config, dense_weights).items():
        array = jax.ShapeDtypeStruct(shape, dtype)
        how, size = _split(name, array, axes, mesh)
        by_split[how] += count * size
        stored += count * array.size * array.dtype.itemsize
    return tuple(sorted(by_split.items())), stored


@cache
def _kinds(config: ModelConfig, dense_weights: str) -> dict[tuple[tuple[int, ...], jnp.dtype, Axes], tuple[str, int]]:
    """Parameters that are alike: the first one's name and their number, by shape, dtype and logical axes."""
    kinds: dict[tuple[tuple[int, ...], jnp.dtype, Axes], tuple[str, int]] = {}
    for name, (array, axes) in abstract_params(config, dense_weights).items():
        key = (array.shape, array.dtype, axes)
        first, count = kinds.get(key, (name, 0))
        kinds[key] = (first, count + 1)
    return kinds


def _split(name: str, array: jax.ShapeDtypeStruct, axes: Axes, mesh: AbstractMesh) -> tuple[str, int]:
    """How the table splits an array, and its bytes on one device."""
    used: list[str] = []
    for entry in partition_spec(name, array.shape, axes, mesh):
        if entry is not None:
            used += [entry] if isinstance(entry, str) else entry
    ways = math.prod(mesh.shape[axis] for axis in used)
    how = f"split over {' × '.join(axis for axis in MESH_AXES if axis in used)}" if used else _WHOLE
    return how, array.size * array.dtype.itemsize // ways


def _ways(mesh: Mapping[str, int], axis: str) -> int:
    """Parts that the table cuts a logical axis into."""
    return math.prod(mesh.get(name, 1) for name in TABLE[axis])
