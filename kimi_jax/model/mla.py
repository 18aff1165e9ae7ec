"""The multi-head latent attention layer, without rotary embedding, with K3.1's optional indexer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.config import ConfigError, ModelConfig
from kimi_jax.model.cache import MLACache, write_rows
from kimi_jax.model.call import Call
from kimi_jax.model.layers import Linear, Norm, parameter
from kimi_jax.ops.indexer import Gather, indexed_attention
from kimi_jax.ops.latent_attention import Combine, decode_attention, filled_blocks, prefill_attention
from kimi_jax.ops.norms import layer_norm
from kimi_jax.parallel.context_parallel import over_positions, write_positions
from kimi_jax.parallel.sharding import Axes, constrain

LATENT_NORM_EPS = 1e-6
"""`q_a_layernorm` and `kv_a_layernorm` use this whatever `rms_norm_eps` says."""


class KeyNorm(nnx.Module):
    """LayerNorm of the indexer's keys; the bias exists where the checkpoint has one."""

    def __init__(self, width: int, bias: bool, eps: float) -> None:
        self.weight = parameter((width,), (None,))
        if bias:
            self.bias = parameter((width,), (None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "B T K"]) -> Float[Array, "B T K"]:
        """See `kimi_jax.ops.norms.layer_norm`."""
        bias = self.bias[...] if hasattr(self, "bias") else None
        return layer_norm(x, self.weight[...], bias, self.eps)


class Indexer(nnx.Module):
    """The projections of the sparse-attention indexer; see `kimi_jax.ops.indexer`. No gradient reaches them."""

    def __init__(self, config: ModelConfig) -> None:
        sizes = config.indexer
        assert sizes is not None
        if sizes.num_heads is None or sizes.head_dim is None:
            raise ConfigError(
                "field 'dsa_config': neither it nor a checkpoint's shapes tell 'index_n_heads' and 'index_head_dim'"
            )
        assert config.mla.query_rank is not None
        self.num_heads, self.head_dim, self.top_k = sizes.num_heads, sizes.head_dim, sizes.top_k
        self.wq_b = Linear(self.num_heads * self.head_dim, config.mla.query_rank, adaptable=False)
        self.wk = Linear(self.head_dim, config.hidden_size, adaptable=False)
        self.weights_proj = Linear(self.num_heads, config.hidden_size, adaptable=False)
        self.k_norm = KeyNorm(self.head_dim, sizes.key_norm_bias, config.norm_eps)

    def queries(self, latent: Float[Array, "B T Q"]) -> Float[Array, "B T G K"]:
        """Index queries from the query latent."""
        q = self.wq_b(latent)
        return q.reshape((*q.shape[:2], self.num_heads, self.head_dim))

    def keys(self, x: Float[Array, "B T D"]) -> Float[Array, "B T K"]:
        """Index keys, one a token: what the cache keeps."""
        return self.k_norm(self.wk(x))


class MultiHeadLatentAttention(nnx.Module):
    """Attention over cached latents; see `kimi_jax.ops.latent_attention` for its forms."""

    def __init__(self, config: ModelConfig, has_indexer: bool, dense_weights: str = "bf16") -> None:
        mla, hidden = config.mla, config.hidden_size
        linear = partial(Linear, stored=dense_weights)  # not of `kv_b_proj`, which is folded into the queries
        by_head = ("heads", mla.num_heads)
        q_width = mla.num_heads * (mla.nope_dim + mla.rope_dim)
        out_width = mla.num_heads * mla.value_dim
        if mla.query_rank is None:
            self.q_proj = linear(q_width, hidden, (by_head, None))
        else:
            self.q_a_proj = linear(mla.query_rank, hidden)
            self.q_a_layernorm = Norm(mla.query_rank, LATENT_NORM_EPS)
            self.q_b_proj = linear(q_width, mla.query_rank, (by_head, None))
        self.kv_a_proj_with_mqa = linear(mla.latent_dim, hidden)
        self.kv_a_layernorm = Norm(mla.kv_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(mla.num_heads * (mla.nope_dim + mla.value_dim), mla.kv_rank, (by_head, None))
        if mla.output_gate:
            self.g_proj = linear(out_width, hidden, (by_head, None))
        self.o_proj = linear(hidden, out_width, (None, by_head))
        if has_indexer:
            self.indexer = Indexer(config)
        self.has_indexer = has_indexer
        self.config = config

    def __call__(
        self, x: Float[Array, "B T D"], call: Call, cache: MLACache | None
    ) -> tuple[Float[Array, "B T D"], MLACache]:
        """Returns the layer's output and its cache with the call's real tokens added."""
        mla = self.config.mla
        heads = ("batch", None, "heads", None)
        q_latent = None if mla.query_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_proj(x) if q_latent is None else self.q_b_proj(q_latent)
        q = constrain("mla q", q.reshape((*q.shape[:2], mla.num_heads, -1)), heads)

        entry = self.kv_a_proj_with_mqa(x)
        c = self.kv_a_layernorm(entry[..., : mla.kv_rank])
        latents = jnp.concatenate([c, entry[..., mla.kv_rank :]], axis=-1)
        places = call.positions, call.real, call.round
        if cache is not None:
            latents = jnp.pad(latents, ((0, 0), (0, 0), (0, cache.latents.shape[-1] - latents.shape[-1])))
            latents = write_positions(write_rows, cache.latents, latents, *places)
        index_keys = None

        kv_b, down = self.kv_b_proj.matrices(x.dtype)
        kv_b = kv_b.reshape((mla.num_heads, mla.nope_dim + mla.value_dim, -1))
        w_key, w_value = kv_b[:, : mla.nope_dim], kv_b[:, mla.nope_dim :]
        stacked = cache is not None and call.round is not None
        entries: Axes = (*((None,) if stacked else ()), "batch", "positions", None)
        arrays: dict[str, Any] = {"q": q, "latents": latents, "w_key": w_key, "w_value": w_value}
        arrays["positions"] = call.positions
        arrays |= {} if down is None else {"down": down}
        arrays |= {} if call.filled is None else {"filled": call.filled}
        arrays |= {} if call.first is None else {"since": call.first}
        arrays |= {"layer": call.round} if stacked else {}
        axes: dict[str, Axes] = {"q": heads, "latents": entries, "w_key": ("heads", None, None)}
        axes |= {"w_value": ("heads", None, None), "positions": ("batch", None), "since": ("batch", None)}
        axes |= {"filled": (), "layer": (), "down": (None, None)}
        attend: Callable[..., Array] = _dense
        if self.has_indexer and q_latent is not None:
            index_keys = self.indexer.keys(x)
            if cache is not None:
                index_keys = write_positions(write_rows, cache.index_keys, index_keys, *places)
            arrays |= {"index_q": self.indexer.queries(q_latent), "index_k": index_keys.astype(x.dtype)}
            arrays["index_weight"] = self.indexer.weights_proj(x)
            axes |= {"index_q": ("batch", None, None, None), "index_k": entries, "index_weight": ("batch", None, None)}
            attend = partial(_indexed, top_k=self.indexer.top_k)
        out = over_positions(attend, arrays, axes, latents.shape[-2], heads)
        out = constrain("mla out", out, heads).reshape((*x.shape[:2], -1))
        if mla.output_gate:
            out = out * nnx.sigmoid(self.g_proj(x))
        return self.o_proj(out), MLACache(latents, index_keys)


def _dense(
    first: Array | int,
    combine: Combine | None,
    gather: Any,
    q: Array,
    latents: Array,
    w_key: Array,
    w_value: Array,
    positions: Array,
    filled: Array | None = None,
    layer: Array | None = None,
    since: Array | None = None,
    down: Array | None = None,
) -> Array:
    """Attention to all of the entries from position `first` on that are held here.

    Without `filled` all are, and the number of blocks is known early: reverse-mode derivatives want that.
    """
    capacity = latents.shape[-2]
    blocks = filled_blocks(capacity if filled is None else filled - first, capacity)
    arguments = q, latents, w_key, w_value, positions - first, blocks, combine, layer
    if q.shape[1] == 1:
        return decode_attention(*arguments, down)  # the only token of its row: there is no other document
    return prefill_attention(*arguments, None if since is None else since - first, down)


def _indexed(
    first: Array | int,
    combine: Combine | None,
    gather: Gather | None,
    q: Array,
    latents: Array,
    w_key: Array,
    w_value: Array,
    positions: Array,
    index_q: Array,
    index_k: Array,
    index_weight: Array,
    top_k: int,
    filled: Array | None = None,
    layer: Array | None = None,
    since: Array | None = None,
    down: Array | None = None,
) -> Array:
    """Attention to those of the entries held here that the indexer chooses among all."""
    index = index_q, index_k, index_weight
    return indexed_attention(
        q, latents, w_key, w_value, *index, positions, filled, top_k, first, combine, gather, layer, since, down
    )
