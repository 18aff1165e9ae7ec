"""The Kimi Delta Attention layer."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import KDACache, empty_kda_cache
from kimi_jax.model.call import Call
from kimi_jax.model.layers import BF16, F32, Linear, parameter
from kimi_jax.ops.convolution import short_convolution
from kimi_jax.ops.kda import gated_rms_norm, kda_chunked, kda_step, log_decay
from kimi_jax.ops.norms import at_least_float32, l2_normalize
from kimi_jax.parallel.context_parallel import over_tokens
from kimi_jax.parallel.sharding import constrain, divided


class ShortConvolution(nnx.Module):
    """The taps of one depthwise convolution, `weight` `[N·K, taps]` (stored as `[N·K, 1, taps]`)."""

    def __init__(self, config: ModelConfig) -> None:
        kda = config.kda
        shape = (kda.num_heads * kda.head_dim, kda.conv_width)
        self.weight = parameter(shape, (("heads", kda.num_heads), None), F32 if config.wrapped else BF16)


class OutputNorm(nnx.Module):
    """The weight `[V]` of the gated norm behind the read-out, shared by the heads."""

    def __init__(self, config: ModelConfig) -> None:
        self.weight = parameter((config.kda.head_dim,), (None,), F32 if config.wrapped else BF16)


class KimiDeltaAttention(nnx.Module):
    """`o_proj(norm(KDA(q, k, v, decay, β)) · σ(gate))`; see `kimi_jax.ops.kda` for the recurrence."""

    def __init__(self, config: ModelConfig, dense_weights: str = "bf16") -> None:
        kda, hidden = config.kda, config.hidden_size
        linear = partial(Linear, stored=dense_weights)
        heads, width = kda.num_heads, kda.head_dim
        inner, by_head = heads * width, ("heads", heads)
        self.q_proj = linear(inner, hidden, (by_head, None))
        self.k_proj = linear(inner, hidden, (by_head, None))
        self.v_proj = linear(inner, hidden, (by_head, None))
        self.q_conv1d = ShortConvolution(config)
        self.k_conv1d = ShortConvolution(config)
        self.v_conv1d = ShortConvolution(config)
        self.f_a_proj = linear(width, hidden)
        self.f_b_proj = linear(inner, width, (by_head, None))
        self.b_proj = linear(heads, hidden, ("heads", None))
        self.A_log = parameter((heads,), ("heads",), F32)
        self.dt_bias = parameter((inner,), (by_head,), F32)
        if kda.full_rank_gate:
            self.g_proj = linear(inner, hidden, (by_head, None))
        else:
            self.g_a_proj = linear(width, hidden)
            self.g_b_proj = linear(inner, width, (by_head, None))
        self.o_norm = OutputNorm(config)
        self.o_proj = linear(hidden, inner, (None, by_head))
        self.config = config

    def __call__(
        self, x: Float[Array, "B T D"], call: Call, cache: KDACache | None
    ) -> tuple[Float[Array, "B T D"], KDACache]:
        """Returns the layer's output and its cache after the call's real tokens."""
        config = self.config
        heads, width = config.kda.num_heads, config.kda.head_dim
        if cache is None:
            cache = empty_kda_cache(config, x.dtype, x.shape[0])

        tokens = divided("tokens", x.shape[1])

        def by_head(y: Array) -> Array:
            return constrain("kda", y.reshape((*y.shape[:2], heads, width)), ("batch", tokens, "heads", None))

        inputs = jnp.stack([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=2)
        taps = jnp.stack([conv.weight[...] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        mixed, tail = short_convolution(inputs, taps, cache.conv_tail, call.lengths, call.first)
        q, k, v = (by_head(mixed[:, :, i]) for i in range(3))

        raw = by_head(self.f_b_proj(self.f_a_proj(x)))
        g = log_decay(raw, self.A_log[...], self.dt_bias[...], config.kda.gate_lower_bound)
        beta = constrain("kda", at_least_float32(self.b_proj(x)), ("batch", tokens, "heads"))
        beta = nnx.sigmoid(beta)
        # Padding neither fades the state nor writes to it.
        g = jnp.where(call.real[:, :, None, None], g, 0)
        beta = jnp.where(call.real[:, :, None], beta, 0)

        q, k, v = l2_normalize(q) * width**-0.5, l2_normalize(k), at_least_float32(v)
        if x.shape[1] == 1:
            out, state = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], cache.state)
            out = out[:, None]
        else:
            begins = None if call.first is None else call.first == call.positions
            out, state = over_tokens(kda_chunked, q, k, v, g, beta, cache.state, begins)
        state = jnp.where((call.lengths > 0)[:, None, None, None], state, cache.state)
        state = constrain("kda state", state, ("batch", "heads", None, None))

        gate = self.g_proj(x) if config.kda.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        out = gated_rms_norm(out, by_head(gate), self.o_norm.weight[...], config.norm_eps)
        out = out.astype(x.dtype).reshape((*x.shape[:2], heads * width))
        return self.o_proj(out), KDACache(state, tail)
