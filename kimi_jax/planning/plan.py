"""Does a model fit a machine, how many conversations go with it, and how fast can it decode at best?"""

from collections.abc import Mapping
from dataclasses import dataclass

from kimi_jax.config import ModelConfig
from kimi_jax.parallel.mesh import MeshError
from kimi_jax.planning.accounting import account
from kimi_jax.planning.devices import DEVICES, Device
from kimi_jax.planning.memory import Placement, best_placement, place
from kimi_jax.planning.roofline import Step, decode_steps

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes of the roofline table."""


@dataclass(frozen=True)
class Paper:
    """The sum on paper: all memory as one piece, every byte once.

    - `checkpoint_bytes`: everything published, with the vision tower.
    - `conversation_bytes`: latents (and indexer keys) of all tokens, KDA states and convolution inputs.
    """

    memory: int
    checkpoint_bytes: int
    conversation_bytes: int

    @property
    def free(self) -> int:
        """Memory that the weights leave; negative where they do not fit."""
        return self.memory - self.checkpoint_bytes

    @property
    def conversations(self) -> int:
        """Whole conversations that fit into it."""
        return max(0, self.free) // self.conversation_bytes


@dataclass(frozen=True)
class Smallest:
    """The smallest numbers of a chip that hold the weights and one conversation, None where none does.

    - `on_paper`: by the sum on paper. `with_mesh`, `mesh`: with copies and temporaries, on the best mesh.

    Tried are the powers of two that divide the experts.
    """

    device: Device
    on_paper: int | None
    with_mesh: int | None
    mesh: Mapping[str, int] | None


@dataclass(frozen=True)
class MachinePlan:
    """What `plan` finds. `placement` is the mesh asked for, or the best one; `steps` one decode step a batch size."""

    device: Device
    count: int
    context: int
    paper: Paper
    placement: Placement
    batch: int | None
    conversations: int
    smallest: tuple[Smallest, ...]
    steps: tuple[Step, ...]

    @property
    def device_memory(self) -> int:
        """Bytes of one JAX device."""
        return self.device.memory // self.device.jax_devices

    @property
    def rows(self) -> int:
        """Conversations of a group of devices: of the batch asked for, or as many as fit, one at least."""
        return max(1, (self.batch or self.conversations) // self.placement.groups)

    def fits(self, batch: int) -> str:
        """Where a batch fits: "with this mesh" (each group of devices holding equally many), "on paper", "nowhere"."""
        if -(-batch // self.placement.groups) * self.placement.groups <= self.conversations:
            return "with this mesh"
        return "on paper" if batch <= self.paper.conversations else "nowhere"


def plan(
    config: ModelConfig,
    device: Device,
    count: int,
    context: int | None = None,
    mesh: Mapping[str, int] | None = None,
    batch: int | None = None,
) -> MachinePlan:
    """Plans a machine of `count` chips.

    **Arguments:**

    - `context`: tokens of a conversation; None is the model's limit.
    - `mesh`: sizes by axis; None takes the one that holds most conversations (and divides `batch`).
    - `batch`: sequences decoded together: one more row for the roofline, and what the mesh is asked to hold.

    **Raises:** `ValueError` for a number below 1, a context beyond the model's limit, a mesh of another number of
    devices, or a batch that the mesh does not divide; `MeshError` where a mesh does not divide the model.
    """
    context = config.max_positions if context is None else context
    for name, value in (("count", count), ("context", context), ("batch", batch)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}")
    if context > config.max_positions:
        raise ValueError(f"context {context} is beyond the model's limit of {config.max_positions} tokens")
    devices, memory = count * device.jax_devices, device.memory // device.jax_devices
    if mesh is None:
        placement = best_placement(config, devices, memory, context, batch)
    else:
        placement = place(config, mesh, context)
        if placement.devices != devices:
            product = " × ".join(f"{name}={size}" for name, size in placement.mesh.items())
            raise ValueError(f"mesh {product} has {placement.devices} devices, {count} x {device.name} have {devices}")
    if batch is not None and batch % placement.groups:
        raise ValueError(f"batch {batch} cannot be split over the {placement.groups} groups of devices of the mesh")
    batches = sorted({*BATCHES, *(() if batch is None else (batch,))})
    return MachinePlan(
        device=device,
        count=count,
        context=context,
        paper=on_paper(config, device.memory * count, context),
        placement=placement,
        batch=batch,
        conversations=placement.conversations(memory),
        smallest=tuple(smallest(config, known, context) for known in DEVICES),
        steps=tuple(decode_steps(config, batches, context)),
    )


def on_paper(config: ModelConfig, memory: int, context: int) -> Paper:
    """The sum on paper for `memory` bytes in all."""
    counted = account(config)
    conversation = counted.cache_bytes_per_token * context + counted.state_bytes + counted.conv_bytes
    return Paper(memory, counted.checkpoint_bytes, conversation)


def smallest(config: ModelConfig, device: Device, context: int) -> Smallest:
    """The smallest numbers of `device` that hold the model and one conversation."""
    paper, count = None, 1
    while config.moe.num_experts % (count * device.jax_devices) == 0:
        if paper is None and on_paper(config, device.memory * count, context).conversations:
            paper = count
        if paper is not None:
            memory = device.memory // device.jax_devices
            try:
                placement = best_placement(config, count * device.jax_devices, memory, context)
            except MeshError:
                break
            if placement.conversations(memory):
                return Smallest(device, paper, count, placement.mesh)
        count *= 2
    return Smallest(device, paper, None, None)
