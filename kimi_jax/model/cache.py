"""The functional cache: everything a sequence leaves behind, in one pytree."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.ops.norms import wide_dtype
from kimi_jax.parallel.sharding import Axes

Leaf = Any
"""A `jax.Array`; in a layout the `jax.ShapeDtypeStruct` or the sharding that belongs in its place."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDACache:
    """What a KDA layer keeps: the state (float32 at least) and the last inputs of its three convolutions.

    - `state`: `[B, N, K, V]`.
    - `conv_tail`: `[B, taps - 1, 3, N·K]`, oldest first; the axis of 3 is q, k, v. In the compute dtype.
    """

    state: Leaf
    conv_tail: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLACache:
    """What an MLA layer keeps of each token, in the compute dtype.

    - `latents`: `[B, S, C + R]`: the kv latent after its norm, and the extra key width.
    - `index_keys`: `[B, S, K]` of the layers with an indexer, otherwise None.
    """

    latents: Leaf
    index_keys: Leaf


LayerCache = KDACache | MLACache


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Cache:
    """The cache of a batch of sequences.

    - `layers`: one entry a decoder layer, by its kind.
    - `lengths`: `[B]` int32, tokens that each row holds.
    - `identity`: the `Model.identity` it was made for, four uint32 numbers; `load_cache` compares it.
    - `max_len`: tokens that a row can hold.

    The functions of `kimi_jax` take a cache and return the next one; the one passed in is donated: its buffers
    become the new one's and must not be used again (`kimi_jax.copy_cache` makes a copy with its own).
    """

    layers: tuple[LayerCache, ...]
    lengths: Leaf
    identity: Leaf
    max_len: int = field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"Cache({self.batch} rows of at most {self.max_len} tokens, {len(self.layers)} layers)"

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.lengths.shape[0]


def cache_layout(config: ModelConfig, dtype: jnp.dtype, batch: int, max_len: int) -> tuple[Cache, dict[str, Axes]]:
    """Shapes, dtypes and logical axes of a cache, nothing allocated.

    **Returns:** a `Cache` of `jax.ShapeDtypeStruct`, and the axes of its arrays by field name.
    """
    kda, mla, taps = config.kda, config.mla, config.kda.conv_width
    wide = wide_dtype(dtype)

    def layer(i: int) -> LayerCache:
        if config.layer_kinds[i] == "kda":
            channels = kda.num_heads * kda.head_dim
            return KDACache(
                jax.ShapeDtypeStruct((batch, kda.num_heads, kda.head_dim, kda.head_dim), wide),
                jax.ShapeDtypeStruct((batch, taps - 1, 3, channels), dtype),
            )
        width = config.indexer.head_dim if config.indexer and config.has_indexer(i) else None
        return MLACache(
            jax.ShapeDtypeStruct((batch, max_len, mla.latent_dim), dtype),
            None if width is None else jax.ShapeDtypeStruct((batch, max_len, width), dtype),
        )

    axes: dict[str, Axes] = {
        "state": ("batch", "heads", None, None),
        "conv_tail": ("batch", None, None, ("heads", kda.num_heads)),
        "latents": ("batch", "positions", None),
        "index_keys": ("batch", "positions", None),
        "lengths": ("batch",),
        "identity": (None,),
    }
    layers = tuple(layer(i) for i in range(config.num_layers))
    lengths, identity = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.uint32)
    return Cache(layers, lengths, identity, max_len), axes


def empty_kda_cache(config: ModelConfig, dtype: jnp.dtype, batch: int) -> KDACache:
    """A KDA layer's cache before the first token: zeros."""
    kda = config.kda
    shape = (batch, kda.num_heads, kda.head_dim, kda.head_dim)
    tail = (batch, kda.conv_width - 1, 3, kda.num_heads * kda.head_dim)
    return KDACache(jnp.zeros(shape, wide_dtype(dtype)), jnp.zeros(tail, dtype))


def write_rows(
    buffer: Float[Array, "B S X"],
    new: Float[Array, "B T X"],
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
) -> Float[Array, "B S X"]:
    """`buffer` with each row's real entries of `new` at `positions`.

    Padding is sent behind the end and dropped there: it neither overwrites an entry nor shifts a write.
    """
    place = jnp.where(real, positions, buffer.shape[1])
    new = new.astype(buffer.dtype)
    return jax.vmap(lambda row, entries, at: row.at[at].set(entries, mode="drop"))(buffer, new, place)
