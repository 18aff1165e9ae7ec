"""Training the adapters of a loaded model, batch by batch."""

from collections.abc import Iterable
from functools import cache

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from kimi_jax.finetune.data.batches import Batch
from kimi_jax.finetune.step import Tokens, TrainState, evaluate_batch, init_state, train_step
from kimi_jax.finetune.targets import LoRAConfig, adapter_spec
from kimi_jax.model.adapters import add_adapters, join_params, split_params
from kimi_jax.model.model import Model
from kimi_jax.parallel.sharding import array_sharding


class Trainer:
    """A model whose adapters are trained; its own weights stay what and where they are.

    - `spec`, `base`, `state`: what `kimi_jax.finetune.step.train_step` takes; `state` may be set to a restored one.
    """

    def __init__(self, model: Model, lora: LoRAConfig, optimizer: optax.GradientTransformation, seed: int = 0) -> None:
        """Adds adapters, A random by `seed` and B zero; a model that has adapters keeps them, and `lora` says no more
        than their dropout.

        **Raises:** `ValueError` for targets that fit no module.
        """
        if model.spec.adapters is None:
            model = add_adapters(model, adapter_spec(model.config, lora), seed)
            self.base, adapters = split_params(model.params)
        else:
            self.base, adapters = split_params(model.params)
            adapters = jax.tree.map(lambda x: x.copy(), adapters)  # a step gives up its own
        self._model, self.spec = model, model.spec
        self.optimizer, self.rate = optimizer, lora.dropout
        self.state: TrainState = init_state(self.spec, optimizer, adapters)
        self.key = jax.random.key(seed)

    @property
    def model(self) -> Model:
        """The model with the adapters as they are now; with copies of them, as the next step gives up its own."""
        adapters = jax.tree.map(lambda x: x.copy(), self.state.adapters)
        return self._model.replace(params=join_params(self.base, adapters))

    def step(self, batch: Batch, drift: bool = True) -> dict[str, Array]:
        """One step on a batch; returns what `train_step` tells of it, without waiting for the devices."""
        tokens = place_batch(self.spec.mesh, batch)
        static = self.spec, self.optimizer, self.rate, drift
        self.state, found = train_step(*static, self.base, self.state, tokens, self.key)
        return found

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean loss over the predicted tokens of all batches, in nats a token."""
        lost = predicted = 0.0
        for batch in batches:
            tokens = place_batch(self.spec.mesh, batch)
            found = evaluate_batch(self.spec, self.base, self.state.adapters, tokens)
            lost, predicted = lost + float(found[0]), predicted + float(found[1])
        return lost / max(predicted, 1.0)


@cache
def process_rows(mesh: Mesh | None) -> tuple[int, int]:
    """Which of how many equal parts of a batch's rows this process gives to its devices.

    **Raises:** `ValueError` where its devices hold rows that do not follow each other.
    """
    if mesh is None:
        return 0, 1
    ways = mesh.shape["data"]
    places = array_sharding("rows", (ways,), ("batch",), mesh).addressable_devices_indices_map((ways,)).values()
    held = sorted({row for index in places if index is not None for row in range(*index[0].indices(ways))})
    if held != list(range(held[0], held[0] + len(held))) or held[0] % len(held) or ways % len(held):
        raise ValueError(
            f"mesh {dict(mesh.shape)}: this process holds the parts {held} of {ways} of a batch; the mesh axis data "
            "must be divided evenly over the processes, or lie within each"
        )
    return held[0] // len(held), ways // len(held)


def place_batch(mesh: Mesh | None, batch: Batch) -> Tokens:
    """A batch on the devices, rows over "data"; each process has the rows of `process_rows`."""
    if mesh is None:
        return Tokens(*(jax.device_put(x) for x in batch))
    count = process_rows(mesh)[1]

    def place(x: np.ndarray) -> Array:
        shape = (x.shape[0] * count, *x.shape[1:])
        sharding = array_sharding("batch", shape, ("batch", *(None,) * (x.ndim - 1)), mesh)
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return Tokens(*map(place, batch))
