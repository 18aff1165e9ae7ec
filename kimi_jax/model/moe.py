"""The latent mixture of experts."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.config import MXFP4_GROUP, ModelConfig
from kimi_jax.model.call import Call
from kimi_jax.model.layers import F32, MLP, U8, Linear, Norm, gated_activation, parameter
from kimi_jax.model.parts import part
from kimi_jax.ops.routed_experts import routed_experts
from kimi_jax.ops.router import choose_experts, expert_weights, router_scores
from kimi_jax.parallel.expert_parallel import expert_parallel
from kimi_jax.parallel.sharding import constrain, divided


class Gate(nnx.Module):
    """The router's parameters: `weight` `[E, D]` and the bias `[E]` that only the choice sees."""

    def __init__(self, config: ModelConfig) -> None:
        self.weight = parameter((config.moe.num_experts, config.hidden_size), ("router", None))
        self.e_score_correction_bias = parameter((config.moe.num_experts,), (None,), F32)


class ExpertProjection(nnx.Module):
    """One projection of all experts, `[E, out, in]`: packed MXFP4 with scales, or `weight`."""

    def __init__(self, experts: int, out: int, into: int, packed: bool) -> None:
        axes = ("experts", None, None)
        if packed:
            self.weight_packed = parameter((experts, out, into // 2), axes, U8)
            self.weight_scale = parameter((experts, out, into // MXFP4_GROUP), axes, U8)
        else:
            self.weight = parameter((experts, out, into), axes)
        self.packed, self.shape, self.adaptable = packed, (experts, out, into), True

    def add_adapter(self, rank: int, scale: float, name: str) -> None:
        """Declares one adapter an expert; see `kimi_jax.model.lora`. Dropout does not reach it."""
        experts, out, into = self.shape
        self.lora_A = parameter((experts, rank, into), ("experts", None, None), F32)
        self.lora_B = parameter((experts, out, rank), ("experts", None, None), F32)
        self.lora_scale = scale

    def arrays(self, layer: Int[Array, ""] | None) -> dict[str, Array]:
        """The stacked arrays by their names, as `kimi_jax.ops.routed_experts` takes them.

        Weights of several layers come with the number of `layer`; an adapter's arrays are of that layer alone.
        """
        names = ("weight_packed", "weight_scale") if self.packed else ("weight",)
        found = {name: getattr(self, name)[...] for name in names} | ({} if layer is None else {"layer": layer})
        if hasattr(self, "lora_A"):
            scale = jnp.asarray(self.lora_scale, F32)
            found |= {"lora_A": self.lora_A[...], "lora_B": self.lora_B[...], "lora_scale": scale}
        return found


class Experts(nnx.Module):
    """The routed experts' projections: `w1` (gate), `w3` (up), `w2` (down)."""

    def __init__(self, config: ModelConfig) -> None:
        moe, width = config.moe, config.expert_input
        self.w1 = ExpertProjection(moe.num_experts, moe.expert_width, width, moe.packed)
        self.w2 = ExpertProjection(moe.num_experts, width, moe.expert_width, moe.packed)
        self.w3 = ExpertProjection(moe.num_experts, moe.expert_width, width, moe.packed)

    def arrays(self, layer: Int[Array, ""] | None) -> dict[str, dict[str, Array]]:
        """All stacked arrays by projection; see `ExpertProjection.arrays`."""
        return {name: getattr(self, name).arrays(layer) for name in ("w1", "w2", "w3")}


class LatentMoE(nnx.Module):
    """`up(norm(Σ weight · expert(down(x)))) + shared(x)`.

    The router sees the full width; the routed experts work in the latent width where there is one, with the
    norm after the weighted sum; the shared experts are one MLP on `x` itself.
    """

    def __init__(self, config: ModelConfig, dense_weights: str = "bf16") -> None:
        moe = config.moe
        self.gate = Gate(config)
        self.experts = Experts(config)
        if moe.latent_width is not None:
            self.routed_expert_down_proj = Linear(moe.latent_width, config.hidden_size, ("latent", None))
            if moe.latent_norm:
                self.routed_expert_norm = Norm(moe.latent_width, config.norm_eps)
            self.routed_expert_up_proj = Linear(config.hidden_size, moe.latent_width, (None, "latent"))
        if moe.num_shared:
            self.shared_experts = MLP(config, moe.num_shared * moe.expert_width, dense_weights)
        self.config = config

    def route(
        self, x: Float[Array, "B T D"], choice: Int[Array, "B T A"] | None
    ) -> tuple[Int[Array, "B T A"], Float[Array, "B T A"]]:
        """Chosen experts and their weights; with `choice` given, only the weights are computed."""
        moe = self.config.moe
        scores = router_scores(x, self.gate.weight[...], moe.router_score)
        scores = constrain("router scores", scores, ("batch", divided("tokens", x.shape[1]), None))
        flat = scores.reshape((-1, moe.num_experts))
        if choice is None:
            bias = self.gate.e_score_correction_bias[...]
            index = choose_experts(flat, bias, moe.experts_per_token, moe.num_groups, moe.top_groups)
        else:
            index = choice.reshape((flat.shape[0], -1))
        weight = expert_weights(flat, index, moe.renormalize, moe.scaling_factor)
        return index.reshape((*x.shape[:2], -1)), weight.reshape((*x.shape[:2], -1))

    def __call__(
        self, x: Float[Array, "B T D"], call: Call, choice: Int[Array, "B T A"] | None = None
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T A"], Float[Array, "B T A"]]:
        """Returns the output, the chosen experts and their weights; padding goes to no expert."""
        moe = self.config.moe
        with part("router"):
            index, weight = self.route(x, choice)
        sent = jnp.where(call.real[..., None], index, moe.num_experts)
        tokens = divided("tokens", x.shape[1])
        z = x
        if moe.latent_width is not None:
            # Fixed here, or the whole projection would be gathered to make all of z on every device.
            with part("latent"):
                z = constrain("latent input", self.routed_expert_down_proj(x), ("batch", tokens, "latent"))

        def apply(rows: Array, chosen: Array, share: Array, own: Any, first: Array | int) -> Array:
            with part("experts"):
                return routed_experts(rows, chosen, share, own, first, gated_activation(self.config))

        experts = self.experts.arrays(call.round)
        with part("dispatch"):
            out = expert_parallel(apply, z, sent, weight, experts, moe.num_experts).astype(x.dtype)
        if moe.latent_width is not None:
            with part("latent"):
                if moe.latent_norm:
                    out = self.routed_expert_norm(out)
                out = self.routed_expert_up_proj(constrain("latent output", out, ("batch", tokens, "latent")))
        if moe.num_shared:
            with part("shared_experts"):
                out = out + self.shared_experts(x)
        return out, index, weight
