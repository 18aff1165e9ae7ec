"""One decoder layer, and what it lets an observer see."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import LayerCache
from kimi_jax.model.call import Call
from kimi_jax.model.kda import KimiDeltaAttention
from kimi_jax.model.layers import MLP, Linear, Norm
from kimi_jax.model.mla import MultiHeadLatentAttention
from kimi_jax.model.moe import LatentMoE
from kimi_jax.model.parts import part
from kimi_jax.ops.attn_res import Bank, mix_query, mix_residuals, save_block
from kimi_jax.parallel.sharding import constrain, divided


class LayerTrace(NamedTuple):
    """Inputs and outputs of a layer's two parts, what it hands on, the router's choice (MoE layers), its cache."""

    hidden: Array
    attn_in: Array
    attn_out: Array
    mlp_in: Array
    mlp_out: Array
    router_index: Array | None
    router_weight: Array | None
    cache: LayerCache


class DecoderLayer(nnx.Module):
    """Attention (KDA or MLA) and MLP (dense or mixture of experts), joined by Attention Residuals.

    Without `attn_res_block_size` it is the plain pre-norm residual layer. `dense_weights` is how the projections of
    the attention and of the dense and shared MLP are stored, as `Linear` takes it.
    """

    def __init__(self, config: ModelConfig, number: int, dense_weights: str = "bf16") -> None:
        width, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = Norm(width, eps)
        self.self_attn: Any = (
            KimiDeltaAttention(config, dense_weights)
            if config.layer_kinds[number] == "kda"
            else MultiHeadLatentAttention(config, config.has_indexer(number), dense_weights)
        )
        self.post_attention_layernorm = Norm(width, eps)
        if config.has_experts(number):
            self.block_sparse_moe = LatentMoE(config, dense_weights)
        else:
            self.mlp = MLP(config, config.intermediate_size, dense_weights)
        if config.attn_res_block_size is not None:
            self.self_attention_res_norm = Norm(width, eps)
            self.self_attention_res_proj = Linear(1, width, adaptable=False)
            self.mlp_res_norm = Norm(width, eps)
            self.mlp_res_proj = Linear(1, width, adaptable=False)
        self.config = config
        self.has_experts = config.has_experts(number)

    def __call__(
        self,
        prefix: Float[Array, "B T D"],
        bank: Bank | None,
        call: Call,
        cache: LayerCache | None,
        choice: Int[Array, "B T A"] | None = None,
        number: Int[Array, ""] | int = 0,
        starts_block: Bool[Array, ""] | bool = False,
    ) -> tuple[Array, Bank | None, LayerTrace]:
        """Returns the running sum and the bank after this layer, and its trace, the cache after it among it.

        **Arguments:**

        - `prefix`: running sum of the current block; `bank`: the sums of the blocks before, None without Attention
            Residuals.
        - `cache`: this layer's, None without one; in a loop an MLA layer gets the stack of `call.round`'s kind.
        - `choice`: expert numbers to use in place of the router's own choice.
        - `number`: of this layer, from 0: its mixes are the bank's `2·number` and the one behind.
        - `starts_block`: whether the running sum goes to the bank and begins anew.
        """
        eps = self.config.norm_eps
        h = prefix
        if bank is not None:
            with part("residuals"):
                # Saved first: what reads the bank before it is written would have it copied.
                bank = save_block(bank, prefix, starts_block, eps)
                h = mix_residuals(prefix, bank, 2 * number, eps, fresh=starts_block)
        attn_in = self.input_layernorm(h)
        with part("kda" if isinstance(self.self_attn, KimiDeltaAttention) else "mla"):
            attn_out, cache = self.self_attn(attn_in, call, cache)
        if isinstance(starts_block, bool):
            prefix = attn_out if starts_block else prefix + attn_out
        else:
            prefix = jnp.where(starts_block, attn_out, prefix + attn_out)
        h = prefix
        if bank is not None:
            with part("residuals"):
                h = mix_residuals(prefix, bank, 2 * number + 1, eps)
        mlp_in = self.post_attention_layernorm(h)
        index = weight = None
        if self.has_experts:
            mlp_out, index, weight = self.block_sparse_moe(mlp_in, call, choice)
        else:
            with part("mlp"):
                mlp_out = self.mlp(mlp_in)
        prefix = constrain("hidden", prefix + mlp_out, ("batch", divided("tokens", prefix.shape[1]), None))
        return prefix, bank, LayerTrace(prefix, attn_in, attn_out, mlp_in, mlp_out, index, weight, cache)

    def mix_queries(self) -> Float[Array, "*G 2 D"]:
        """The queries of its two mixes; of a stack of layers, of each."""
        mixes = ("self_attention_res_norm", "self_attention_res_proj"), ("mlp_res_norm", "mlp_res_proj")
        weights = [[getattr(self, name).weight[...] for name in mix] for mix in mixes]
        return jnp.stack([mix_query(norm, proj) for norm, proj in weights], axis=-2)
