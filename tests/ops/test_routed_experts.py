from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.activations import silu_glu, situ
from kimi_jax.ops.routed_experts import routed_experts

EXPERTS, LATENT, WIDTH, TOKENS, CHOSEN = 6, 32, 64, 7, 3
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

apply = jax.jit(partial(routed_experts, activate=partial(situ, beta=4.0, linear_beta=25.0)))


def projection(rng, experts, out, into, packed):
    """The arrays of one projection, and the same in float64 `[E, O, I]`."""
    if not packed:
        weight = (rng.normal(size=(experts, out, into)) / np.sqrt(into)).astype(np.float32)
        return {"weight": weight}, weight.astype(np.float64)
    codes = rng.integers(0, 16, (experts, out, into))
    scale = rng.integers(123, 126, (experts, out, into // 32)).astype(np.uint8)
    arrays = {"weight_packed": (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8), "weight_scale": scale}
    return arrays, CODES[codes] * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=-1)


def random_experts(packed, experts=EXPERTS, latent=LATENT, width=WIDTH):
    rng = np.random.default_rng(packed)
    shapes = {"w1": (width, latent), "w3": (width, latent), "w2": (latent, width)}
    both = {name: projection(rng, experts, *shape, packed) for name, shape in shapes.items()}
    return {name: arrays for name, (arrays, _) in both.items()}, {name: full for name, (_, full) in both.items()}


def loop(z, index, weight, matrices, held):
    """Token by token, choice by choice, in float64: `w2(situ(w1 z, w3 z))` of the experts in `held`."""
    out = np.zeros(z.shape)
    for m, a in np.ndindex(index.shape):
        if index[m, a] not in held:
            continue
        w1, w2, w3 = (matrices[name][index[m, a]] for name in ("w1", "w2", "w3"))
        gate, up = w1 @ z[m].astype(np.float64), w3 @ z[m].astype(np.float64)
        hidden = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
        out[m] += float(weight[m, a]) * (w2 @ hidden)
    return out


@pytest.fixture(scope="module")
def tokens():
    """`z`, `index`, `weight`: every token has different experts, and weights that do not sum to 1."""
    rng = np.random.default_rng(0)
    index = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)]).astype(np.int32)
    weight = rng.uniform(0.1, 1, (TOKENS, CHOSEN)).astype(np.float32)
    return rng.normal(size=(TOKENS, LATENT)).astype(np.float32), index, weight


def assert_close(found, wanted):
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_equals_the_loop(tokens, packed):
    arrays, matrices = random_experts(packed)
    assert_close(apply(*tokens, arrays, 0), loop(*tokens, matrices, range(EXPERTS)))


@pytest.mark.parametrize(
    "index",
    [
        np.full((TOKENS, CHOSEN), 0),
        np.full((TOKENS, CHOSEN), EXPERTS - 1),
        np.tile([1, 4, 1], (TOKENS, 1)),
        np.full((TOKENS, CHOSEN), EXPERTS),
    ],
    ids=["all to the first", "all to the last", "one of them twice", "none"],
)
def test_lopsided_choices(tokens, index):
    z, _, weight = tokens
    arrays, matrices = random_experts(packed=True)
    index = index.astype(np.int32)
    assert_close(apply(z, index, weight, arrays, 0), loop(z, index, weight, matrices, range(EXPERTS)))


def test_numbers_held_nowhere_are_skipped(tokens):
    """Padding rows carry the number of experts; nothing of them may leak, not even NaN."""
    z, index, weight = (x.copy() for x in tokens)
    arrays, matrices = random_experts(packed=True)
    index[1], index[3, 1], index[5, 0] = EXPERTS, 10**6, -1
    wanted = loop(z, index, weight, matrices, range(EXPERTS))
    z[1] = np.nan
    assert_close(apply(z, index, weight, arrays, 0), wanted)


@pytest.mark.parametrize("first", [0, 2, 4])
def test_a_device_applies_the_experts_it_holds(tokens, first):
    arrays, matrices = random_experts(packed=True)
    held = jax.tree.map(lambda x: x[first : first + 2], arrays)
    assert_close(apply(*tokens, held, first), loop(*tokens, matrices, range(first, first + 2)))


def test_w1_is_the_gate_and_w3_the_linear_side():
    """Gate 40, up 0.5: about 4·0.5; the other way round it would be 0.5·σ(0.5)·25."""
    one = np.eye(2, dtype=np.float32)[None]
    experts = {name: {"weight": one * scale} for name, scale in (("w1", 40), ("w3", 0.5), ("w2", 1))}
    found = apply(np.eye(2, dtype=np.float32), np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32), experts, 0)
    np.testing.assert_allclose(found, 4 * 25 * np.tanh(0.5 / 25) * np.eye(2), rtol=1e-5)


def test_the_300th_expert():
    """Numbers above 255: 300 experts, hidden width 32. Expert e multiplies by e."""
    number = np.arange(300, dtype=np.float32)[:, None, None]
    unit = np.broadcast_to(np.eye(32, dtype=np.float32), (300, 32, 32))
    experts = {"w1": {"weight": unit}, "w3": {"weight": unit}, "w2": {"weight": unit * number}}
    z = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    index = np.array([[299, 0], [43, 256], [255, 299]], np.int32)
    weight = np.array([[1, 1], [1, 0.5], [1, 2]], np.float32)
    found = jax.jit(partial(routed_experts, activate=silu_glu))(z, index, weight, experts, 0)
    wide = z.astype(np.float64)
    wanted = wide**2 / (1 + np.exp(-wide)) * np.array([[299], [43 + 128], [255 + 598]])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_bfloat16_tokens_are_summed_in_float32():
    """256 + 1 − 256: the middle term survives only in a float32 sum."""
    one = jnp.ones((3, 1, 1), jnp.bfloat16)
    experts = {"w1": {"weight": one}, "w3": {"weight": one}, "w2": {"weight": one}}
    weight = jnp.array([[256.0, 1.0, -256.0]])
    index = jnp.array([[0, 1, 2]])
    plain = jax.jit(partial(routed_experts, activate=lambda gate, up: gate))
    found = plain(jnp.ones((1, 1), jnp.bfloat16), index, weight, experts, 0)
    assert (found.dtype, found.tolist()) == (jnp.float32, [[1.0]])
