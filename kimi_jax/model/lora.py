"""Low-rank adapters (LoRA) of a model's matrices: which modules have one, and where its two arrays stand.

An adapter adds `scale · B (A x)` to `W x`. `A` `[r, in]` and `B` `[out, r]` are float32 parameters named `lora_A` and
`lora_B` beside the `weight`, split over the mesh as it is; those of the routed experts are stacked, `[E, r, in]` and
`[E, out, r]`. The weights themselves stay as they are stored.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

HALVES = ("lora_A", "lora_B")


@dataclass(frozen=True)
class AdapterSpec:
    """The adapters of a model; hashable.

    - `modules`: the module's name in the checkpoint (without `language_model.`, `model.` and `.weight`; of routed
        experts without their number), rank, and scale; sorted.
    """

    modules: tuple[tuple[str, int, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", tuple(sorted(self.modules)))
        for name, rank, _ in self.modules:
            if rank < 1:
                raise ValueError(f"adapter of {name}: rank {rank} must be at least 1")

    @cached_property
    def by_name(self) -> dict[str, tuple[int, float]]:
        """Rank and scale by module name."""
        return {name: (rank, scale) for name, rank, scale in self.modules}


def is_adapter(name: str) -> bool:
    """Whether a parameter's dotted name is that of half an adapter."""
    return name.rpartition(".")[2] in HALVES


def adaptable(module: nnx.Module) -> Iterator[tuple[str, Any]]:
    """The modules below `module` that can have an adapter, with their dotted names."""
    for path, part in nnx.iter_modules(module):
        if getattr(part, "adaptable", False):
            yield ".".join(map(str, path)), part


def attach_layer(layer: nnx.Module, adapters: AdapterSpec, numbers: Sequence[int]) -> set[str]:
    """Gives a decoder layer its adapters, in place: of the layer, or of all in a stack, that `numbers` count.

    **Returns:** the names of the modules that got one.

    **Raises:** `ValueError` where the layers of a stack have different ones.
    """
    done: set[str] = set()
    for tail, part in adaptable(layer):
        names = [f"layers.{number}.{tail}" for number in numbers]
        found = {adapters.by_name.get(name) for name in names}
        if len(found) > 1:
            raise ValueError(
                f"adapters of {', '.join(names[:3])}, …: layers that run as a loop must have the same ones; choose all "
                "of them, or load with loop=False"
            )
        (own,) = found
        if own is not None:
            part.add_adapter(*own, names[0])
            done.update(names)
    return done


_DROPOUT: ContextVar[tuple[Array, float] | None] = ContextVar("kimi_jax_dropout", default=None)


@contextmanager
def dropout(key: Array | None, rate: float = 0.0) -> Iterator[None]:
    """While a function is traced: adapters see their inputs with a share of `rate` set to zero, the rest scaled up.

    `key`: a JAX random key; None keeps everything.
    """
    token = _DROPOUT.set(None if key is None or not rate else (key, rate))
    try:
        yield
    finally:
        _DROPOUT.reset(token)


@contextmanager
def dropout_round(number: Array) -> Iterator[None]:
    """Other zeros in each round of a loop over layers."""
    held = _DROPOUT.get()
    with dropout(None) if held is None else dropout(jax.random.fold_in(held[0], number), held[1]):
        yield


def dropped(x: Float[Array, "*lead I"], name: str) -> Float[Array, "*lead I"]:
    """What the adapter of the module called `name` sees of `x`."""
    held = _DROPOUT.get()
    if held is None:
        return x
    key, rate = held
    kept = jax.random.bernoulli(jax.random.fold_in(key, crc32(name.encode())), 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
