"""The whole language model."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import Cache, LayerCache
from kimi_jax.model.call import make_call
from kimi_jax.model.decoder import DecoderLayer, LayerTrace
from kimi_jax.model.layers import Embedding, Linear, Norm
from kimi_jax.ops.attn_res import mix_residuals
from kimi_jax.ops.norms import wide_dtype
from kimi_jax.parallel.sharding import constrain


class Output(NamedTuple):
    """What a forward call leaves: the input of `norm`, every layer's cache after it, every layer's trace."""

    final_hidden: Array
    caches: tuple[LayerCache, ...]
    traces: tuple[LayerTrace, ...]


class Transformer(nnx.Module):
    """Embedding, decoder layers, final mix and norm, head. Attribute names are the checkpoint's."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.embed_tokens = Embedding(config)
        self.layers = nnx.List([DecoderLayer(config, i) for i in range(config.num_layers)])
        self.norm = Norm(config.hidden_size, config.norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = Norm(config.hidden_size, config.norm_eps)
            self.output_attn_res_proj = Linear(1, config.hidden_size)
        if not config.tie_embeddings:
            self.lm_head = Linear(config.vocab_size, config.hidden_size, ("vocab", None))
        self.config = config
        self.dtype = dtype

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        cache: Cache | None = None,
        choice: dict[int, Int[Array, "B T A"]] | None = None,
    ) -> Output:
        """Runs the layers over right-padded tokens.

        **Arguments:**

        - `tokens`: ids; `lengths`: real tokens of each row in this call.
        - `cache`: what came before, None for nothing and no cache.
        - `choice`: expert numbers by 0-based layer, in place of the router's own.
        """
        call = make_call(tokens.shape[1], lengths, None if cache is None else cache.lengths)
        prefix = self.embed_tokens(tokens, self.dtype)
        bank: tuple[Array, ...] = ()
        caches, traces = [], []
        for i, layer in enumerate(self.layers):
            before = None if cache is None else cache.layers[i]
            given = None if choice is None else choice.get(i)
            prefix, bank, after, trace = layer(prefix, bank, call, before, given)
            caches.append(after)
            traces.append(trace)
        if self.config.attn_res_block_size is not None:
            prefix = mix_residuals(
                prefix,
                bank,
                self.output_attn_res_proj.weight[...][0],
                self.output_attn_res_norm.weight[...],
                self.config.norm_eps,
            )
        return Output(prefix, tuple(caches), tuple(traces))

    def logits(self, final_hidden: Float[Array, "*lead D"]) -> Float[Array, "*lead W"]:
        """`lm_head(norm(h))` in float32 at least, over the axis "vocab"."""
        h = self.norm(final_hidden)
        head = self.embed_tokens if self.config.tie_embeddings else self.lm_head
        wide: Any = wide_dtype(h.dtype)
        out = jnp.einsum("...d,wd->...w", h, head.weight[...].astype(h.dtype), preferred_element_type=wide)
        return constrain("logits", out, ("batch", *(None,) * (out.ndim - 2), "vocab"))
