"""The least time of a decode step: the bytes it must move and the operations it must do, over a machine's rates.

Nothing else is counted: no exchange between devices, no start of a program, no second reading. A real step is slower.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kimi_jax.config import ModelConfig
from kimi_jax.model.model import abstract_params
from kimi_jax.planning.accounting import account
from kimi_jax.planning.devices import Device


@dataclass(frozen=True)
class Step:
    """One decode step of `batch` sequences that hold `context` tokens each; bytes over all devices.

    - `dense_bytes`: weights that every token meets, once: all but the experts and the embedding table.
    - `touched`: share of the experts that some token of the batch chooses, if each chooses at random:
        `1 - (1 - A/E)^batch`. `expert_bytes`: their weights, rounded.
    - `state_bytes`: KDA states and convolution inputs, read and written.
    - `cache_bytes`: latents read; with an indexer the keys of all tokens and the latents of the chosen ones.
    - `flops`: of the matrix products, two for each number of a weight; attention in the latent space.
    """

    batch: int
    context: int
    dense_bytes: int
    touched: float
    expert_bytes: int
    state_bytes: int
    cache_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        """All bytes moved."""
        return self.dense_bytes + self.expert_bytes + self.state_bytes + self.cache_bytes

    def seconds(self, device: Device, count: int) -> tuple[float, str]:
        """Least time on `count` chips, and what sets it: "memory" or "compute".

        **Raises:** `ValueError` where the device's bandwidth is not known.
        """
        if device.bandwidth is None:
            raise ValueError(f"the bandwidth of {device.name} is not known")
        moving = self.bytes / (device.bandwidth * count)
        computing = 0.0 if device.peak_flops is None else self.flops / (device.peak_flops * count)
        return max(moving, computing), "memory" if moving >= computing else "compute"


def decode_steps(config: ModelConfig, batches: Iterable[int], context: int) -> list[Step]:
    """A `Step` for each batch size."""
    dense, experts = _weight_bytes(config)
    counted = account(config)
    state = 2 * (counted.state_bytes + counted.conv_bytes)
    cached, attention = _attention(config, context)
    flops = 2 * counted.active_parameters + attention
    moe = config.moe
    steps = []
    for batch in batches:
        touched = 1 - (1 - moe.experts_per_token / moe.num_experts) ** batch
        size = round(touched * experts)
        steps.append(Step(batch, context, dense, touched, size, batch * state, batch * cached, batch * flops))
    return steps


def _weight_bytes(config: ModelConfig) -> tuple[int, int]:
    """Bytes that every step reads, and bytes of all routed experts."""
    dense = experts = 0
    for name, (array, _) in abstract_params(config).items():
        size = array.size * array.dtype.itemsize
        if ".experts." in name:
            experts += size
        elif config.tie_embeddings or not name.startswith("embed_tokens."):
            dense += size
    return dense, experts


def _attention(config: ModelConfig, context: int) -> tuple[int, int]:
    """Cache bytes that a token reads, and operations besides the weights', over all layers."""
    kda, mla = config.kda, config.mla
    size = 0
    flops = len(config.kda_layers) * 6 * kda.num_heads * kda.head_dim**2  # Sᵀk, k ⊗ …, Sᵀq
    for layer in config.mla_layers:
        read = context
        indexer = config.indexer if config.has_indexer(layer) else None
        if indexer is not None:
            assert indexer.head_dim is not None  # counting the model has refused this already
            assert indexer.num_heads is not None
            read = min(context, indexer.top_k)
            size += context * indexer.head_dim * 2
            flops += 2 * context * indexer.num_heads * indexer.head_dim
        size += read * mla.latent_dim * 2
        flops += 2 * read * mla.num_heads * (mla.latent_dim + mla.kv_rank)
    return size, flops
