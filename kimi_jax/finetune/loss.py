"""The next-token loss, a piece of the sequence at a time: logits of all tokens never exist together."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.model.transformer import Transformer
from kimi_jax.parallel.sharding import TABLE, active_mesh

PIECE_LOGITS = 1 << 24
"""Logits of a piece on a device, where one token of each row is not more: 64 MiB in float32."""


def next_token_loss(
    module: Transformer,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> Float[Array, ""]:
    """`Σ weight · −log p(target)` over all places, in nats; not divided by anything.

    **Arguments:**

    - `hidden`: the `final_hidden` of `module`'s output.
    - `targets`: the id to be predicted at each place; `weights`: 0 where nothing is.

    The sequence goes through the head in pieces, the vocabulary lies in pieces over the mesh axis "tensor"; a backward
    pass computes a piece's logits again.
    """
    rows, tokens = targets.shape
    piece = loss_piece(rows, tokens, module.config.vocab_size)
    pad = -tokens % piece

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape((rows, -1, piece, *x.shape[2:])), 1, 0)

    @jax.checkpoint
    def one_piece(total: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        h, target, weight = inputs
        logits = module.logits(h)
        lost = jax.nn.logsumexp(logits, axis=-1) - _at(logits, target)
        return total + jnp.sum(lost * weight.astype(lost.dtype)), None

    wide = jax.eval_shape(module.logits, hidden[:, :1]).dtype
    pieces = split(hidden), split(targets), split(weights)
    return jax.lax.scan(one_piece, jnp.zeros((), wide), pieces)[0]


def loss_piece(rows: int, tokens: int, vocab: int) -> int:
    """Tokens of each row whose logits exist at the same time, on the mesh being traced for."""
    mesh = active_mesh()
    ways = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in TABLE["batch"] + TABLE["vocab"])
    return max(1, min(tokens, PIECE_LOGITS * ways // (rows * vocab)))


def _at(logits: Float[Array, "B T W"], index: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """`logits[b, t, index[b, t]]`, as a sum that a split vocabulary needs no gathering for."""
    chosen = jnp.arange(logits.shape[-1], dtype=index.dtype)[None, None, :] == index[..., None]
    return jnp.sum(jnp.where(chosen, logits, 0), axis=-1)
