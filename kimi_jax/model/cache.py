"""The functional cache: everything a sequence leaves behind, in one pytree."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.model.segments import segments
from kimi_jax.ops.norms import wide_dtype
from kimi_jax.ops.tpu import LANES
from kimi_jax.parallel.sharding import Axes, positions_innermost

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
    """What an MLA layer keeps of each token.

    - `latents`: `[B, S, C + R]`: the kv latent after its norm, and the extra key width; in the compute dtype, or in
        float8_e4m3fn where the cache was so made. Of a layer with an indexer zeros follow (`entry_width`).
    - `index_keys`: `[B, S, K]` of the layers with an indexer, otherwise None; in the compute dtype.
    """

    latents: Leaf
    index_keys: Leaf


LayerCache = KDACache | MLACache
FP8 = jnp.dtype(jnp.float8_e4m3fn)
UNROLLED_ROWS = 64
"""Rows that are written without a loop: for TPU7x the compiler copies the whole cache into a loop's layout and back."""
ROW_AXIS = {"state": -4, "conv_tail": -4, "latents": -3, "index_keys": -3}
"""The axis of the batch in a layer's arrays, counted from the end: stacks of layers have one more in front."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Cache:
    """The cache of a batch of sequences.

    - `layers`: one entry a decoder layer, by its kind; of layers that run as a loop one entry a stack
        (`kimi_jax.model.segments`), whose arrays have the rounds as a leading axis.
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
        return f"Cache({self.batch} rows of at most {self.max_len} tokens)"

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.lengths.shape[0]

    @property
    def latent_dtype(self) -> jnp.dtype | None:
        """Dtype of the latents; None in a model without such layers."""
        return next((layer.latents.dtype for layer in self.layers if isinstance(layer, MLACache)), None)


def entry_width(config: ModelConfig, layer: int) -> int:
    """Numbers of a cached latent entry: `C + R`, with an indexer the next multiple of `LANES`.

    Where the width is no such multiple, TPUs keep the positions side by side, and to gather some of the positions the
    compiler first lays out all of the cache another way.
    """
    width = config.mla.latent_dim
    return -(-width // LANES) * LANES if config.has_indexer(layer) else width


def cache_layout(
    config: ModelConfig,
    dtype: jnp.dtype,
    batch: int,
    max_len: int,
    loop: bool = False,
    latent_dtype: jnp.dtype | None = None,
) -> tuple[Cache, dict[str, Axes]]:
    """Shapes, dtypes and logical axes of a cache, nothing allocated; with `loop`, of stacks where layers are looped.

    `latent_dtype`: of the latents, in place of the compute dtype `dtype`.

    **Returns:** a `Cache` of `jax.ShapeDtypeStruct`, and the axes of a layer's arrays by field name.
    """
    kda, taps = config.kda, config.kda.conv_width
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
            jax.ShapeDtypeStruct((batch, max_len, entry_width(config, i)), latent_dtype or dtype),
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

    def stack(i: int, rounds: int) -> LayerCache:
        def grow(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rounds, *x.shape) if rounds > 1 else x.shape, x.dtype)

        return jax.tree.map(grow, layer(i))

    layers = tuple(
        stack(part.first + place, part.rounds) for part in segments(config, loop) for place in range(part.period)
    )
    lengths, identity = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.uint32)
    return Cache(layers, lengths, identity, max_len), axes


def empty_kda_cache(config: ModelConfig, dtype: jnp.dtype, batch: int) -> KDACache:
    """A KDA layer's cache before the first token: zeros."""
    kda = config.kda
    shape = (batch, kda.num_heads, kda.head_dim, kda.head_dim)
    tail = (batch, kda.conv_width - 1, 3, kda.num_heads * kda.head_dim)
    return KDACache(jnp.zeros(shape, wide_dtype(dtype)), jnp.zeros(tail, dtype))


def write_rows(
    buffer: Float[Array, "*G B S X"],
    new: Float[Array, "B T X"],
    positions: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "*G B S X"]:
    """`buffer` with each row's real entries of `new` at `positions`; of a stack of layers, in `layer`'s part.

    A row's positions follow each other and may lie outside the buffer; its real entries come first. Padding and what
    lies outside is not written. A row's window is read, merged and put back in place: a scatter would have the whole
    buffer copied into a layout of its own.
    """
    tokens, (capacity, width) = new.shape[1], buffer.shape[-2:]
    window = min(tokens, capacity)
    lead = () if layer is None else (layer,)
    sizes = (*(1 for _ in lead), 1, window, width)

    def one_row(row: Array, buffer: Array) -> Array:
        first = positions[row, 0]
        start = jnp.clip(first, 0, capacity - window)
        source = start - first + jnp.arange(window, dtype=first.dtype)
        inside = (source >= 0) & (source < tokens)
        source = jnp.clip(source, 0, tokens - 1)
        index = tuple(jnp.asarray(i, start.dtype) for i in (*lead, row, start, 0))
        held = jax.lax.dynamic_slice(buffer, index, sizes)
        chosen = jnp.where((inside & real[row, source])[:, None], new[row, source], held.reshape((window, width)))
        return positions_innermost(jax.lax.dynamic_update_slice(buffer, chosen.reshape(sizes), index))

    if buffer.dtype == FP8:  # it has no infinity: what is larger would become NaN
        new = jnp.clip(new, -float(jnp.finfo(FP8).max), float(jnp.finfo(FP8).max))
    new = new.astype(buffer.dtype)
    rows = new.shape[0]
    return jax.lax.fori_loop(0, rows, one_row, buffer, unroll=min(rows, UNROLLED_ROWS))
