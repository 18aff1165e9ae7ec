"""Kimi Delta Attention: the gates, one step, and the chunk form that prefill and training use.

The state `S` of a head is `[K, V]`, zero at the start, and a token does

    S ← diag(exp(g)) S;   S ← S + β k ⊗ (v − Sᵀ k);   o = Sᵀ q

with `g ≤ 0` the log decay of each key channel, `β` the write strength, `k` and `q` of unit length, `q` scaled by
K^-1/2. Everything here runs in float32 at least: a state kept in bfloat16 drifts.

The chunk form handles `CHUNK` tokens at a time with matrix products, and what does not need the state for all chunks at
once. Every decay in it is a *product* of the tokens' own, over a stretch of tokens, and never a quotient of two running
products: nothing overflows, and a strong decay costs no digits of a weak one beside it. With
D[t,s] = exp(Σ_{s<u≤t} g_u) a channel,

    Aqk = tril(Σ_K q k D),   Akk = tril(β_t Σ_K k k D, −1),   T = (I + Akk)⁻¹ diag(β)
    W = T (exp(P) ∘ k),   U = T v,   V' = U − W S
    o = (exp(P) ∘ q) S + Aqk V',   S' = diag(exp(P_last)) S + (exp(P_last − P) ∘ k)ᵀ V'

where P is the running sum inside the chunk.

Where a row holds several documents, one after the other, none knows of another: D[t,s] is 0 for tokens of two, exp(P)
for tokens of a document that begins in the chunk, exp(P_last − P) for tokens of one that ends in it, and exp(P_last)
where one begins. These are set to 0, not decayed to it, and everything else follows.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kimi_jax.ops.norms import along_last, at_least_float32, unit_rms

SPAN = 256
"""Tokens whose chunks are prepared at the same time: what a call holds does not grow with its tokens."""
CHUNK = 64
BLOCK = 16

# The state is float32 on every machine: accelerators round the factors of a product unless told not to.
_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def log_decay(
    raw: Float[Array, "*lead N K"],
    A_log: Float[Array, " N"],
    dt_bias: Float[Array, " NK"],
    lower_bound: float | None,
) -> Float[Array, "*lead N K"]:
    """Logarithm of the forget gate, float32 at least, in (`lower_bound`, 0), or unbounded below without one.

    `m·σ(exp(A_log)·(raw + dt_bias))` with the bound m, otherwise `−exp(A_log)·softplus(raw + dt_bias)`.
    `A_log` is one number a head.
    """
    raw = at_least_float32(raw)
    heads, width = raw.shape[-2:]
    lead = (1,) * (raw.ndim - 2)
    shifted = raw + dt_bias.astype(raw.dtype).reshape((*lead, heads, width))
    rate = jnp.exp(A_log.astype(raw.dtype)).reshape((*lead, heads, 1))
    if lower_bound is None:
        return -rate * jax.nn.softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def gated_rms_norm(
    x: Float[Array, "*lead V"], gate: Float[Array, "*lead V"], weight: Float[Array, " V"], eps: float
) -> Float[Array, "*lead V"]:
    """RMSNorm over a head's V numbers times `σ(gate)`, all of it in float32 at least."""
    unit, gate = unit_rms(x, eps), at_least_float32(gate)
    return unit * along_last(weight, unit) * jax.nn.sigmoid(gate.astype(unit.dtype))


def kda_step(
    q: Float[Array, "B N K"],
    k: Float[Array, "B N K"],
    v: Float[Array, "B N V"],
    g: Float[Array, "B N K"],
    beta: Float[Array, "B N"],
    state: Float[Array, "B N K V"],
) -> tuple[Float[Array, "B N V"], Float[Array, "B N K V"]]:
    """One token. `q`, `k` of unit length, `q` scaled; `g` the log decay. Returns the read-out and the state."""
    state = state * jnp.exp(g)[..., None]
    error = v - _einsum("bnkv,bnk->bnv", state, k)
    state = state + (beta[..., None] * k)[..., None] * error[..., None, :]
    return _einsum("bnkv,bnk->bnv", state, q), state


def kda_recurrent(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T N V"],
    g: Float[Array, "B T N K"],
    beta: Float[Array, "B T N"],
    state: Float[Array, "B N K V"],
    begins: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    """Token after token with `kda_step`: the plain reference of `kda_chunked`."""

    def step(state: Array, inputs: tuple[Any, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta, begins = inputs
        if begins is not None:
            state = jnp.where(begins[:, None, None, None], 0, state)
        out, state = kda_step(q, k, v, g, beta, state)
        return state, out

    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta, begins))
    state, out = jax.lax.scan(step, state, inputs)
    return jnp.moveaxis(out, 0, 1), state


def kda_chunked(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T N V"],
    g: Float[Array, "B T N K"],
    beta: Float[Array, "B T N"],
    state: Float[Array, "B N K V"],
    begins: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    """The same as `kda_recurrent`, a chunk at a time; see the formulas at the top of this file.

    **Arguments:**

    - `q`, `k`: unit length, `q` scaled by K^-1/2.
    - `v`: values. `g`: log decay, ≤ 0. `beta`: write strength.
    - `state`: what the tokens before left behind.
    - `begins`: which tokens begin a document: the state is zero before them. None: none does.

    A token with `g = 0` and `beta = 0` leaves the state as it is: that is how padding is passed.

    **Returns:** the read-outs and the state after the last token.
    """
    tokens = q.shape[1]
    by_head = None if begins is None else jnp.broadcast_to(begins[:, :, None], beta.shape)
    inputs = (q, k, v, g, beta, by_head)
    if tokens > SPAN:
        spans = -(-tokens // SPAN)
        padding = [(0, 0), (0, spans * SPAN - tokens)]

        def cut(x: Array) -> Array:
            x = jnp.pad(x, padding + [(0, 0)] * (x.ndim - 2))
            return jnp.moveaxis(x.reshape((x.shape[0], spans, SPAN, *x.shape[2:])), 1, 0)

        # A backward pass prepares a span's chunks again: they take more room than all that goes in.
        body = jax.checkpoint(_next_span, prevent_cse=False)
        state, out = jax.lax.scan(body, state, jax.tree.map(cut, inputs))
        out = jnp.moveaxis(out, 0, 1)
        return out.reshape((out.shape[0], spans * SPAN, *out.shape[3:]))[:, :tokens], state
    state, out = _next_span(state, inputs)
    return out, state


def _next_span(state: Array, inputs: tuple[Any, ...]) -> tuple[Array, Array]:
    """At most `SPAN` tokens: everything but the recurrence for all of their chunks at the same time."""
    batch, tokens, heads, _ = inputs[0].shape
    # A short call takes one short chunk: 61 tokens of padding behind 3 real ones would be waste.
    chunk = next(size for size in (BLOCK, 2 * BLOCK, CHUNK) if size >= min(tokens, CHUNK))
    chunks = -(-tokens // chunk)
    padding = chunks * chunk - tokens

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape((batch, chunks, chunk, *x.shape[2:]))
        return jnp.moveaxis(x, (1, 3), (0, 2)).reshape((chunks * batch * heads, chunk, *x.shape[4:]))

    inner = _inside_chunks(*jax.tree.map(split, inputs))
    inner = jax.tree.map(lambda x: x.reshape((chunks, batch, heads, *x.shape[1:])), inner)
    state, out = jax.lax.scan(_next_chunk, state, inner)
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape((batch, chunks * chunk, heads, inputs[2].shape[-1]))
    return state, out[:, :tokens]


class _Chunk(NamedTuple):
    """What a chunk does, whatever the state it meets; one entry a token of the chunk but for `decay`."""

    queries: Float[Array, "*lead C K"]
    """exp(P) ∘ q."""
    removed: Float[Array, "*lead C K"]
    """W, what is read from the state and taken off the values."""
    values: Float[Array, "*lead C V"]
    """U."""
    attention: Float[Array, "*lead C C"]
    """Aqk."""
    keys: Float[Array, "*lead C K"]
    """exp(P_last − P) ∘ k."""
    decay: Float[Array, "*lead K"]
    """exp(P_last)."""


def _next_chunk(state: Array, chunk: _Chunk) -> tuple[Array, Array]:
    """The only part that waits for the chunk before: state `[B, N, K, V]`."""
    written = chunk.values - _einsum("bntk,bnkv->bntv", chunk.removed, state)
    out = _einsum("bntk,bnkv->bntv", chunk.queries, state) + _einsum("bnts,bnsv->bntv", chunk.attention, written)
    return state * chunk.decay[..., None] + _einsum("bntk,bntv->bnkv", chunk.keys, written), out


def _inside_chunks(q: Array, k: Array, v: Array, g: Array, beta: Array, begins: Array | None) -> _Chunk:
    """All chunks of all heads at the same time; arrays `[G, C, K]`, `beta` and `begins` `[G, C]`."""
    # A CPU joins single tokens for less than their exponentials cost; elsewhere arrays of few tokens fill no register.
    forms = {"cpu": 1, "default": BLOCK}
    whole = jax.lax.platform_dependent(q, k, g, **{name: partial(_pair_scores, size=n) for name, n in forms.items()})
    if begins is not None:
        whole = _apart(whole, begins)
    transform = invert_unit_lower(whole.overlap[:, 0] * beta[..., None]) * beta[..., None, :]
    return _Chunk(
        queries=whole.before * q,
        removed=_einsum("gts,gsk->gtk", transform, whole.before * k),
        values=_einsum("gts,gsv->gtv", transform, v),
        attention=whole.attention[:, 0],
        keys=whole.after * k,
        decay=whole.whole[:, 0],
    )


class _Stretches(NamedTuple):
    """What is known of n stretches of h tokens each: scores of their pairs, and decays.

    - `attention`: `Σ_K q_t k_s D[t,s]` for s ≤ t of the same stretch, `[G, n, h, h]`, zero above. `overlap`: of k and
        k, for s < t.
    - `before`: decay from the stretch's start up to and including the token, `[G, n·h, K]`; `after`: from behind the
        token to its end. `whole`: of all of it, `[G, n, K]`.
    """

    attention: Array
    overlap: Array
    before: Array
    after: Array
    whole: Array


def _stretches(q: Float[Array, "G C K"], k: Float[Array, "G C K"], g: Float[Array, "G C K"], size: int) -> _Stretches:
    """Stretches of `size` tokens, pair by pair."""

    def cut(x: Array) -> Array:
        return x.reshape((x.shape[0], x.shape[1] // size, size, x.shape[-1]))

    steps, keys, (t, s, u) = cut(g), cut(k), np.indices((size,) * 3)
    between = _einsum("gnuk,tsu->gntsk", steps, ((s < u) & (u <= t)).astype(g.dtype))
    carried = jnp.exp(between) * keys[:, :, None]
    attention, overlap = (jnp.sum(cut(x)[:, :, :, None] * carried, axis=-1) for x in (q, k))
    t, u = np.indices((size,) * 2)
    before, after = (
        jnp.exp(_einsum("gnuk,tu->gntk", steps, summed.astype(g.dtype))).reshape(g.shape) for summed in (u <= t, u > t)
    )
    return _Stretches(jnp.tril(attention), jnp.tril(overlap, -1), before, after, jnp.exp(jnp.sum(steps, axis=2)))


def _pair_scores(q: Float[Array, "G C K"], k: Float[Array, "G C K"], g: Float[Array, "G C K"], size: int) -> _Stretches:
    """Chunks of C tokens, joined from stretches of `size` tokens.

    Neighbours are joined until the chunk is one stretch. The scores between the two of a pair are a matrix product,
    for D[t,s] is the decay from behind s to the first's end times that from the second's start to t.
    """
    groups, chunk, width = g.shape
    known = _stretches(q, k, g, size)

    def halves(x: Array) -> tuple[Array, Array]:
        """First and second stretches of the pairs, `[G, pairs, tokens, K]`."""
        pairs = chunk // size // 2
        x = x.reshape((groups, pairs, 2, x.shape[1] // (2 * pairs), width))
        return x[:, :, 0], x[:, :, 1]

    def join(first: Array, second: Array) -> Array:
        return jnp.concatenate([first, second], axis=2).reshape((groups, chunk, width))

    while size < chunk:
        (before, second), (first, after) = halves(known.before), halves(known.after)
        whole_first, whole_second = halves(known.whole)
        carried = first * halves(k)[0]
        known = _Stretches(
            _join_scores(known.attention, halves(q)[1] * second, carried),
            _join_scores(known.overlap, halves(k)[1] * second, carried),
            join(before, second * whole_first),
            join(first * whole_second, after),
            (whole_first * whole_second)[:, :, 0],
        )
        size *= 2
    return known


def _apart(chunk: _Stretches, begins: Bool[Array, "G C"]) -> _Stretches:
    """Chunks, a stretch each, in which tokens of two documents have nothing to do with each other."""
    document = jnp.cumsum(begins, axis=1, dtype=jnp.int32)  # 0 for the one that goes on from the chunk before
    same = (document[:, :, None] == document[:, None, :])[:, None]
    goes_on, last = document == 0, document == document[:, -1:]
    return _Stretches(
        jnp.where(same, chunk.attention, 0),
        jnp.where(same, chunk.overlap, 0),
        jnp.where(goes_on[..., None], chunk.before, 0),
        jnp.where(last[..., None], chunk.after, 0),
        jnp.where(goes_on[:, -1:, None], chunk.whole, 0),
    )


def _join_scores(
    scores: Float[Array, "G n h h"], second: Float[Array, "G p h K"], carried: Float[Array, "G p h K"]
) -> Float[Array, "G p m m"]:
    """Scores of pairs of stretches: those inside each, those of the second's tokens with the first's keys, zeros."""
    groups, pairs, size, _ = second.shape
    inside = scores.reshape((groups, pairs, 2, size, size))
    between = _einsum("gptk,gpsk->gpts", second, carried)
    upper = jnp.concatenate([inside[:, :, 0], jnp.zeros_like(between)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([between, inside[:, :, 1]], axis=-1)], axis=-2)


def invert_unit_lower(strict: Float[Array, "*lead n n"]) -> Float[Array, "*lead n n"]:
    """`(I + strict)⁻¹` for a strictly lower triangular matrix, n a power of two, by forward substitution.

    Row by row up to n = `BLOCK`: row i is e_i less `strict[i]` times the rows above it. Beyond that block by block:
    `[[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]]`. (The product form `(I−N)(I+N²)(I+N⁴)…` cancels badly at
    real decay magnitudes.)
    """
    n = strict.shape[-1]
    if n > BLOCK:
        h = n // 2
        first, second = invert_unit_lower(jnp.stack([strict[..., :h, :h], strict[..., h:, h:]]))
        corner = -_einsum("...ij,...jk->...ik", second, _einsum("...ij,...jk->...ik", strict[..., h:, :h], first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)

    def row(i: Array, inverse: Array) -> Array:
        factors = jax.lax.dynamic_index_in_dim(strict, i, axis=-2, keepdims=False)
        above = jnp.sum(factors[..., None] * inverse, axis=-2)
        new = along_last(jax.nn.one_hot(i, n), above) - above
        return jax.lax.dynamic_update_index_in_dim(inverse, new, i, axis=-2)

    return jax.lax.fori_loop(0, n, row, jnp.zeros_like(strict))
