"""Routed experts with adapters, written down plainly: unpacked, every expert applied to every row, in float64."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.ops.activations import situ

EXPERTS, LATENT, WIDTH, RANK, CHOSEN = 16, 32, 64, 3, 3
SCALES = {"w1": 2.0, "w2": 0.5, "w3": 1.5}
SHAPES = {"w1": (WIDTH, LATENT), "w2": (LATENT, WIDTH), "w3": (WIDTH, LATENT)}
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

activate = partial(situ, beta=4.0, linear_beta=25.0)


@cache
def base():
    """The packed arrays of every projection, and what they mean."""
    rng, packed, full = np.random.default_rng(0), {}, {}
    for name, (out, into) in SHAPES.items():
        codes = rng.integers(0, 16, (EXPERTS, out, into))
        scale = rng.integers(123, 126, (EXPERTS, out, into // 32)).astype(np.uint8)
        packed[name] = {"weight_packed": (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)}
        packed[name]["weight_scale"] = scale
        full[name] = CODES[codes] * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=-1)
    return packed, full


@cache
def adapters():
    """`lora_A` and `lora_B` of every projection in float32; the change they make is about as large as the base."""
    rng = np.random.default_rng(1)
    return {
        name: {
            "lora_A": (rng.normal(size=(EXPERTS, RANK, into)) / np.sqrt(into)).astype(np.float32),
            "lora_B": (rng.normal(size=(EXPERTS, out, RANK)) / 2).astype(np.float32),
        }
        for name, (out, into) in SHAPES.items()
    }


def with_adapters(arrays, own, scales=SCALES):
    """The projections' arrays with those of the adapters beside them."""
    return {name: {**x, **own[name], "lora_scale": jnp.float32(scales[name])} for name, x in arrays.items()}


def random_tokens(count):
    """`z`, `index`, `weight`; the last expert is nobody's choice."""
    rng = np.random.default_rng(count)
    index = np.stack([rng.permutation(EXPERTS - 1)[:CHOSEN] for _ in range(count)]).astype(np.int32)
    weight = rng.uniform(0.1, 1, (count, CHOSEN)).astype(np.float32)
    return rng.normal(size=(count, LATENT)).astype(np.float32), index, weight


def pulls(z):
    """What the gradients are pulled back from."""
    return np.random.default_rng(2).normal(size=z.shape)


def dense(z, weight, own, index, full):
    """The sums by einsum; an index of `EXPERTS` chooses nothing."""
    matrices = {
        name: full[name] + SCALES[name] * jnp.einsum("eor,eri->eoi", x["lora_B"], x["lora_A"])
        for name, x in own.items()
    }
    gate, up = (jnp.einsum("ml,efl->mef", z, matrices[name]) for name in ("w1", "w3"))
    each = jnp.einsum("mef,elf->mel", activate(gate, up), matrices["w2"])
    share = jnp.einsum("ma,mae->me", weight, jax.nn.one_hot(index, EXPERTS, dtype=z.dtype))
    return jnp.einsum("me,mel->ml", share, each)


@jax.jit
def dense_gradients(arguments, index, full, pull):
    """The sums, and the gradients of (z, weight, adapters, unpacked base)."""
    value, back = jax.vjp(lambda z, weight, own, full: dense(z, weight, own, index, full), *arguments, full)
    return value, back(pull)


def wanted_gradients(z, index, weight):
    """`dense_gradients` in float64, rows of padding taken as zeros."""
    with jax.enable_x64(True):
        rows = np.where(index[:, :1] < EXPERTS, z, 0)
        arguments = jax.tree.map(lambda x: np.asarray(x, np.float64), (rows, weight, adapters()))
        return jax.tree.map(np.asarray, dense_gradients(arguments, index, base()[1], pulls(z)))


def assert_trees_close(found, wanted, tolerance):
    """Every array to `tolerance` of the largest number in it."""

    def close(path, a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(close, found, wanted)
