"""The jitted functions over a model and its cache: prefill, decode, forward, score, trace.

Each wrapper checks its arguments, pads the tokens to a bucket and calls one compiled function; compiled
functions depend on the configuration, mesh and dtype (`ModelSpec`) and on shapes, nothing else. The cache passed
in is donated.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.inference.arguments import (
    ArrayLike,
    check_batch,
    length_array,
    pad_tokens,
    row_mask,
    token_array,
)
from kimi_jax.inference.caches import check_cache, constrain_cache
from kimi_jax.model.cache import Cache, KDACache
from kimi_jax.model.decoder import LayerTrace
from kimi_jax.model.model import Model, ModelSpec, Params, computing
from kimi_jax.model.transformer import Output

SCORE_PIECE = 128
"""Tokens whose logits exist at the same time in `score`."""


def prefill(model: Model, tokens: ArrayLike, lengths: ArrayLike, cache: Cache) -> tuple[Float[Array, "B W"], Cache]:
    """Adds tokens to the cache; may be called again with the next piece of a prompt, of any length.

    **Arguments:**

    - `tokens`: `[B, T]` ids, right-padded.
    - `lengths`: `[B]`, real tokens of each row in this call; 0 leaves a row as it is.
    - `cache`: what the rows hold so far; donated.

    **Returns:** float32 logits at each row's last real token, and the next cache. A row of length 0 gets zeros; a
    row that would pass `max_len` gets NaN and its cache row stays as it is.

    **Raises:** `ValueError` for ids outside the vocabulary, wrong shapes or lengths, or a cache of another layout.
    """
    array = token_array(model.config, tokens, 2)
    check_cache(model, cache, array.shape[0])
    counts = length_array(lengths, *array.shape)
    return extend(model.spec, model.params, pad_tokens(array), counts, cache)


def decode(
    model: Model, tokens: ArrayLike, cache: Cache, active: ArrayLike | None = None
) -> tuple[Float[Array, "B W"], Cache]:
    """Adds one token to each row.

    **Arguments:**

    - `tokens`: `[B]` ids. `cache`: donated.
    - `active`: bool `[B]`; rows with False stay untouched and get zero logits. None means all rows.

    **Returns:** as `prefill`.
    """
    array = token_array(model.config, tokens, 1)
    check_cache(model, cache, array.shape[0])
    counts = row_mask("active", active, array.shape[0]).astype("int32")
    return extend(model.spec, model.params, array[:, None], counts, cache)


def forward(model: Model, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Float[Array, "B T W"]:
    """Logits (float32) at every position, without a cache. Behind a row's length they mean nothing."""
    array = token_array(model.config, tokens, 2)
    check_batch(model, array.shape[0])
    counts = length_array(lengths, *array.shape)
    return _forward(model.spec, model.params, pad_tokens(array), counts)[:, : array.shape[1]]


def score(model: Model, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Float[Array, "B T1"]:
    """Log-probability (float32, nats) of each token given those before it: `[B, T - 1]`, first of token 1.

    The logits of only `SCORE_PIECE` positions exist at a time. Positions behind a row's length get 0.
    """
    array = token_array(model.config, tokens, 2)
    check_batch(model, array.shape[0])
    counts = length_array(lengths, *array.shape)
    return _score(model.spec, model.params, pad_tokens(array), counts)[:, : array.shape[1] - 1]


@dataclass(frozen=True)
class Trace:
    """What `trace` saw; each tuple is indexed by layer number from 0, None where a layer has no such thing.

    - `hidden`: `[B, T, D]`, what the layer hands on (with Attention Residuals: the running sum of its block).
    - `attn_in`, `attn_out`, `mlp_in`, `mlp_out`: `[B, T, D]`, behind the norm and before the residual sum.
    - `router_index`, `router_weight`: `[B, T, A]`, chosen experts and weights, in the same order.
    - `kda_state`: `[B, N, K, V]` after the last token. `conv_state`: `[B, 3, 3·N·K]`, the last inputs of the
        convolutions, oldest first; q, then k, then v.
    - `final_hidden`: `[B, T, D]`, input of `model.norm`.
    """

    hidden: tuple[Array, ...]
    attn_in: tuple[Array, ...]
    attn_out: tuple[Array, ...]
    mlp_in: tuple[Array, ...]
    mlp_out: tuple[Array, ...]
    router_index: tuple[Array | None, ...]
    router_weight: tuple[Array | None, ...]
    kda_state: tuple[Array | None, ...]
    conv_state: tuple[Array | None, ...]
    final_hidden: Array


def trace(model: Model, tokens: ArrayLike) -> Trace:
    """Runs `tokens` `[B, T]` without a cache and returns what happens inside."""
    array = token_array(model.config, tokens, 2)
    check_batch(model, array.shape[0])
    if array.shape[1] == 0:
        raise ValueError("trace needs at least one token")
    counts = length_array(None, *array.shape)
    out: Output = _run(model.spec, model.params, pad_tokens(array), counts)
    fields = [name for name in LayerTrace._fields if name != "cache"]
    seen = [{name: getattr(layer, name) for name in fields} for layer in out.observed]
    seen = jax.tree.map(lambda x: x[:, : array.shape[1]], seen)
    kda = [layer.cache if isinstance(layer.cache, KDACache) else None for layer in out.observed]
    tails = [None if cache is None else cache.conv_tail for cache in kda]
    return Trace(
        **{name: tuple(layer[name] for layer in seen) for name in fields},
        kda_state=tuple(None if cache is None else cache.state for cache in kda),
        conv_state=tuple(None if tail is None else tail.reshape((*tail.shape[:2], -1)) for tail in tails),
        final_hidden=out.final_hidden[:, : array.shape[1]],
    )


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def extend(
    spec: ModelSpec, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], cache: Cache
) -> tuple[Float[Array, "B W"], Cache]:
    """The compiled function behind `prefill` and `decode`; arguments are taken as checked."""
    with computing(spec):
        fits = cache.lengths + lengths <= cache.max_len
        counts = jnp.where(fits, lengths, 0)
        module = spec.module(params)
        out: Output = module(tokens, counts, cache)
        last = jnp.maximum(counts - 1, 0)
        logits = module.logits(jnp.take_along_axis(out.final_hidden, last[:, None, None], axis=1)[:, 0])
        logits = jnp.where((counts > 0)[:, None], logits, jnp.where(fits, 0.0, jnp.nan)[:, None])
        after = replace(cache, layers=out.caches, lengths=cache.lengths + counts)
        return logits, constrain_cache(spec, after)


@partial(jax.jit, static_argnums=0)
def _forward(spec: ModelSpec, params: Params, tokens: Array, lengths: Array) -> Array:
    with computing(spec):
        module = spec.module(params)
        return module.logits(module(tokens, lengths).final_hidden)


@partial(jax.jit, static_argnums=0)
def _score(spec: ModelSpec, params: Params, tokens: Array, lengths: Array) -> Array:
    with computing(spec):
        module = spec.module(params)
        hidden = module(tokens, lengths).final_hidden
        target = jnp.roll(tokens, -1, axis=1)
        piece = min(SCORE_PIECE, tokens.shape[1])

        def one_piece(inputs: tuple[Array, Array]) -> Array:
            logits = jax.nn.log_softmax(module.logits(inputs[0]), axis=-1)
            return jnp.take_along_axis(logits, inputs[1][..., None], axis=-1)[..., 0]

        def split(x: Array) -> Array:
            return jnp.moveaxis(x.reshape((x.shape[0], -1, piece, *x.shape[2:])), 1, 0)

        scores = jnp.moveaxis(jax.lax.map(one_piece, (split(hidden), split(target))), 0, 1)
        real = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None] - 1
        return jnp.where(real, scores.reshape(tokens.shape), 0)


@partial(jax.jit, static_argnums=0)
def _run(spec: ModelSpec, params: Params, tokens: Array, lengths: Array) -> Output:
    with computing(spec):
        return spec.module(params)(tokens, lengths, observe=lambda trace: trace)
