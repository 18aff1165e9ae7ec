"""Kimi Delta Attention: the gates, one step, and the chunk form that prefill and training use.

The state `S` of a head is `[K, V]`, zero at the start, and a token does

    S ← diag(exp(g)) S;   S ← S + β k ⊗ (v − Sᵀ k);   o = Sᵀ q

with `g ≤ 0` the log decay of each key channel, `β` the write strength, `k` and `q` of unit length, `q` scaled by
K^-1/2. Everything here runs in float32 at least: a state kept in bfloat16 drifts.

The chunk form handles `CHUNK` tokens at a time with matrix products. Every exponent in it is a *sum* of log
decays over a stretch of tokens, hence ≤ 0, and never a difference of two running sums: nothing overflows, and
a strong decay costs no digits of a weak one beside it. With D[t,s] = exp(Σ_{s<u≤t} g_u) a channel,

    Aqk = tril(Σ_K q k D),   Akk = tril(β_t Σ_K k k D, −1),   T = (I + Akk)⁻¹ diag(β)
    W = T (exp(P) ∘ k),   U = T v,   V' = U − W S
    o = (exp(P) ∘ q) S + Aqk V',   S' = diag(exp(P_last)) S + (exp(P_last − P) ∘ k)ᵀ V'

where P is the running sum inside the chunk. D is built from blocks of `BLOCK` tokens: pairwise inside a
block, and between blocks from the end of the earlier to the start of the later one.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kimi_jax.ops.norms import along_last, at_least_float32

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
    x, gate = at_least_float32(x), at_least_float32(gate)
    unit = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
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
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    """Token after token with `kda_step`: the plain reference of `kda_chunked`."""

    def step(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta = inputs
        out, state = kda_step(q, k, v, g, beta, state)
        return state, out

    inputs = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    state, out = jax.lax.scan(step, state, inputs)
    return jnp.moveaxis(out, 0, 1), state


def kda_chunked(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T N V"],
    g: Float[Array, "B T N K"],
    beta: Float[Array, "B T N"],
    state: Float[Array, "B N K V"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    """The same as `kda_recurrent`, a chunk at a time; see the formulas at the top of this file.

    **Arguments:**

    - `q`, `k`: unit length, `q` scaled by K^-1/2.
    - `v`: values. `g`: log decay, ≤ 0. `beta`: write strength.
    - `state`: what the tokens before left behind.

    A token with `g = 0` and `beta = 0` leaves the state as it is: that is how padding is passed.

    **Returns:** the read-outs and the state after the last token.
    """
    batch, tokens, heads, _ = q.shape
    # A short call takes one short chunk: 61 tokens of padding behind 3 real ones would be waste.
    chunk = next(size for size in (BLOCK, 2 * BLOCK, CHUNK) if size >= min(tokens, CHUNK))
    chunks = -(-tokens // chunk)
    padding = chunks * chunk - tokens

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape((batch, chunks, chunk, *x.shape[2:]))
        return jnp.moveaxis(x, (1, 3), (0, 2))  # [chunks, B, N, chunk, ...]

    state, out = jax.lax.scan(_chunk_step, state, tuple(split(x) for x in (q, k, v, g, beta)))
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape((batch, chunks * chunk, heads, v.shape[-1]))
    return out[:, :tokens], state


def _chunk_step(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
    """One chunk: inputs `[B, N, chunk, ...]`, state `[B, N, K, V]`."""
    q, k, v, g, beta = inputs
    chunk = q.shape[2]

    def in_blocks(x: Array) -> Array:
        return x.reshape((*x.shape[:2], chunk // BLOCK, BLOCK, x.shape[-1]))

    # Log decays, each summed over its own stretch of tokens; axes [B, N, block, token in block, K].
    steps, keys = in_blocks(g), in_blocks(k)
    before = _sums(steps, lambda t, u: u <= t)  # from the block's start up to and including the token
    after = _sums(steps, lambda t, u: u > t)  # from behind the token to the block's end
    whole = jnp.sum(steps, axis=3)  # the block's sum [B, N, block, K]
    within = jnp.exp(_stretch_sums(steps, lambda t, s, u: (s < u) & (u <= t)))  # [B, N, block, t, s, K]
    between = _stretch_sums(whole, lambda t, s, u: (s < u) & (u < t))  # of whole blocks [B, N, t, s, K]

    # Keys of block s, carried to the start of a later block t: [B, N, t, s, token, K].
    carried = jnp.exp(after[:, :, None] + between[:, :, :, :, None]) * keys[:, :, None]

    def scores(x: Array) -> Array:
        """Σ_K x_t k_s D[t,s] as [B, N, chunk, chunk]; only s ≤ t is meant."""
        x = in_blocks(x)
        same = jnp.sum(x[..., :, None, :] * keys[..., None, :, :] * within, axis=-1)
        earlier = _einsum("bnctk,bncdsk->bnctds", x * jnp.exp(before), carried)
        own = jnp.eye(chunk // BLOCK, dtype=bool)[None, None, :, None, :, None]
        return jnp.where(own, same[:, :, :, :, None, :], earlier).reshape((*q.shape[:3], chunk))

    attention = jnp.tril(scores(q))
    overlap = jnp.tril(scores(k), -1) * beta[..., None]

    # The same sums from the chunk's start and to its end.
    from_start = jnp.exp(_sums(whole, lambda t, u: u < t)[:, :, :, None] + before).reshape(g.shape)
    to_end = jnp.exp(after + _sums(whole, lambda t, u: u > t)[:, :, :, None]).reshape(g.shape)

    transform = invert_unit_lower(overlap) * beta[..., None, :]
    w = _einsum("bnts,bnsk->bntk", transform, from_start * k)
    written = _einsum("bnts,bnsv->bntv", transform, v) - _einsum("bntk,bnkv->bntv", w, state)
    out = _einsum("bntk,bnkv->bntv", from_start * q, state) + _einsum("bnts,bnsv->bntv", attention, written)
    decay = jnp.exp(jnp.sum(g, axis=2))[..., None]
    return state * decay + _einsum("bntk,bntv->bnkv", to_end * k, written), out


def _sums(x: Float[Array, "*lead n K"], summed: Callable[..., np.ndarray]) -> Float[Array, "*lead n K"]:
    """Entry t is the sum of `x` over the u for which `summed(t, u)`, as a product with zeros and ones."""
    t, u = np.indices((x.shape[-2],) * 2)
    return _einsum("...uk,tu->...tk", x, summed(t, u).astype(x.dtype))


def _stretch_sums(x: Float[Array, "*lead n K"], summed: Callable[..., np.ndarray]) -> Float[Array, "*lead n n K"]:
    """Entry (t, s) is the sum of `x` over the u for which `summed(t, s, u)`."""
    t, s, u = np.indices((x.shape[-2],) * 3)
    return _einsum("...uk,tsu->...tsk", x, summed(t, s, u).astype(x.dtype))


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
