"""The small parts: parameters with logical axes, linear maps, norms, embedding, dense MLP."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.ops.activations import silu_glu, situ
from kimi_jax.ops.norms import rms_norm
from kimi_jax.parallel.sharding import Axes, constrain, divided

BF16 = jnp.dtype(jnp.bfloat16)
F32 = jnp.dtype(jnp.float32)
U8 = jnp.dtype(jnp.uint8)


def parameter(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype = BF16) -> nnx.Param:
    """A parameter that is only declared: shape, dtype as published, and logical axes. Loading fills it."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes)


class Linear(nnx.Module):
    """`y = W x`, no bias; `weight` is `[out, in]` as stored."""

    def __init__(self, out: int, into: int, axes: Axes = (None, None)) -> None:
        self.weight = parameter((out, into), axes)

    def __call__(self, x: Float[Array, "*lead I"]) -> Float[Array, "*lead O"]:
        """`x` times the transpose of `weight`, in the dtype of `x`."""
        return jnp.einsum("...i,oi->...o", x, self.weight[...].astype(x.dtype))


class Norm(nnx.Module):
    """RMSNorm with its `weight` `[D]`."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype = BF16) -> None:
        self.weight = parameter((width,), (None,), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        """See `kimi_jax.ops.norms.rms_norm`."""
        return rms_norm(x, self.weight[...], self.eps)


class Embedding(nnx.Module):
    """The table `weight` `[W, D]`, rows over the vocabulary."""

    def __init__(self, config: ModelConfig) -> None:
        self.weight = parameter((config.vocab_size, config.hidden_size), ("vocab", None))

    def __call__(self, tokens: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
        """The tokens' rows in `dtype`."""
        rows = jnp.take(self.weight[...], tokens, axis=0, mode="clip").astype(dtype)
        return constrain("embedding", rows, ("batch", divided("tokens", tokens.shape[1]), None))


def gated_activation(config: ModelConfig) -> Callable[[Array, Array], Array]:
    """The activation of (gate, up) that `hidden_act` names."""
    if config.activation == "silu":
        return silu_glu
    beta, linear_beta = config.situ_beta, config.situ_linear_beta
    return lambda gate, up: situ(gate, up, beta, linear_beta)


class MLP(nnx.Module):
    """`down(act(gate(x), up(x)))` of width `width`, over the axis "ffn"."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        self.gate_proj = Linear(width, config.hidden_size, ("ffn", None))
        self.up_proj = Linear(width, config.hidden_size, ("ffn", None))
        self.down_proj = Linear(config.hidden_size, width, (None, "ffn"))
        self.config = config

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The MLP of each token."""
        hidden = gated_activation(self.config)(self.gate_proj(x), self.up_proj(x))
        return self.down_proj(constrain("mlp hidden", hidden, ("batch", divided("tokens", x.shape[1]), "ffn")))
