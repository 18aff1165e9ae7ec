"""The names under which a model's operations are found in a profile: `with part("kda"): …`."""

from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import jax

Part = Literal[
    "embedding", "residuals", "kda", "mla", "mlp", "router", "latent", "dispatch", "experts", "shared_experts", "head"
]
"""Attention of both kinds with their projections; the dense MLP; of the mixture the router, the projections to and from
the latent width, the exchange between devices, routed and shared experts; embedding, residual mixes, norm and head."""
PARTS: tuple[str, ...] = get_args(Part)


def part(name: Part) -> AbstractContextManager[Any]:
    """Names what is traced inside."""
    scope: AbstractContextManager[Any] = jax.named_scope(name)
    return scope
