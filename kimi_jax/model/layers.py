"""The small parts: parameters with logical axes, linear maps, norms, embedding, dense MLP."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.model.lora import dropped
from kimi_jax.ops.activations import silu_glu, situ
from kimi_jax.ops.low_rank import low_rank
from kimi_jax.ops.norms import along_last, at_least_float32, rms_norm, wide_dtype
from kimi_jax.ops.rounding import ROUNDED
from kimi_jax.parallel.sharding import Axes, constrain, divided

BF16 = jnp.dtype(jnp.bfloat16)
F32 = jnp.dtype(jnp.float32)
U8 = jnp.dtype(jnp.uint8)


def parameter(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype = BF16) -> nnx.Param:
    """A parameter that is only declared: shape, dtype as published, and logical axes. Loading fills it."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes)


def project(x: Float[Array, "*lead I"], weight: Array, dtype: jnp.dtype | None = None) -> Float[Array, "*lead O"]:
    """`x` times the transpose of `weight` `[O, I]` in the dtype of `x`; the product has `dtype`, or that of `x`."""
    wanted: Any = dtype
    return jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype), preferred_element_type=wanted)


class Linear(nnx.Module):
    """`y = W x`, no bias; `weight` is `[out, in]` as published.

    With `stored` "int8" or "fp8" it is rounded to eight bits, and `weight_scale` `[out]` holds a float32 a channel: see
    `kimi_jax.ops.rounding`.
    """

    def __init__(
        self, out: int, into: int, axes: Axes = (None, None), stored: str = "bf16", adaptable: bool = True
    ) -> None:
        self.weight = parameter((out, into), axes, BF16 if stored == "bf16" else ROUNDED[stored][0])
        if stored != "bf16":
            self.weight_scale = parameter((out,), axes[:1], F32)
        self.axes, self.adaptable = axes, adaptable

    def add_adapter(self, rank: int, scale: float, name: str) -> None:
        """Declares the adapter's arrays; see `kimi_jax.model.lora`."""
        out, into = self.weight.shape
        self.lora_A = parameter((rank, into), (None, self.axes[1]), F32)
        self.lora_B = parameter((out, rank), (self.axes[0], None), F32)
        self.lora_scale, self.lora_name = scale, name

    def __call__(self, x: Float[Array, "*lead I"], dtype: jnp.dtype | None = None) -> Float[Array, "*lead O"]:
        """See `project`; scales multiply the product, and the adapter's is added to it, in float32 at least."""
        rounded, adapted = hasattr(self, "weight_scale"), hasattr(self, "lora_A")
        if not rounded and not adapted:
            return project(x, self.weight[...], dtype)
        narrow = dtype or x.dtype
        out = at_least_float32(project(x, self.weight[...], wide_dtype(x.dtype) if adapted else dtype))
        if rounded:
            out = out * along_last(self.weight_scale[...], out)
        if adapted:
            seen = dropped(x, self.lora_name)
            out = out + low_rank(seen, self.lora_A[...], self.lora_B[...], self.lora_scale).astype(out.dtype)
        return out.astype(narrow)

    def matrices(self, dtype: jnp.dtype) -> tuple[Float[Array, "O J"], Float[Array, "r I"] | None]:
        """The matrix itself, for those who do not multiply it with an input at once.

        Of an adapted one `[W, scale · B]` and A, in `dtype`: the product is that of the first with `[x, A x]`. Their
        sum `W + scale · B A` would lose what is below a step of W. Dropout does not reach it. Otherwise W and None.
        """
        if not hasattr(self, "lora_A"):
            return self.weight[...], None
        change = (self.lora_scale * self.lora_B[...]).astype(dtype)
        return jnp.concatenate([self.weight[...].astype(dtype), change], axis=1), self.lora_A[...].astype(dtype)


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
    """`down(act(gate(x), up(x)))` of width `width`, over the axis "ffn"; `stored` as `Linear` takes it."""

    def __init__(self, config: ModelConfig, width: int, stored: str = "bf16") -> None:
        self.gate_proj = Linear(width, config.hidden_size, ("ffn", None), stored)
        self.up_proj = Linear(width, config.hidden_size, ("ffn", None), stored)
        self.down_proj = Linear(config.hidden_size, width, (None, "ffn"), stored)
        self.config = config

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The MLP of each token."""
        hidden = gated_activation(self.config)(self.gate_proj(x), self.up_proj(x))
        return self.down_proj(constrain("mlp hidden", hidden, ("batch", divided("tokens", x.shape[1]), "ffn")))
