"""Attention and recurrence over several devices against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.model.cache import write_rows
from kimi_jax.model.mla import _dense, _indexed
from kimi_jax.ops.kda import kda_chunked
from kimi_jax.parallel.context_parallel import over_positions, over_tokens, write_positions
from kimi_jax.parallel.mesh import make_mesh
from kimi_jax.parallel.sharding import on_mesh

MESHES = [{"context": 8}, {"data": 2, "context": 2, "tensor": 2}]
SEVERAL = ([0, 3, 8, 10, 33], [17, 32])  # where documents begin in each row
B, S, N, C, R, H, V = 2, 64, 2, 16, 4, 8, 8


def close(found, wanted, limit=2e-6):
    assert found.shape == wanted.shape
    assert float(jnp.abs(found - wanted).max()) <= limit * float(jnp.abs(wanted).max())


@pytest.fixture(scope="module")
def attention():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    tokens = 4
    arrays = {
        "q": normal(B, tokens, N, H + R),
        "latents": normal(B, S, C + R),
        "w_key": normal(N, H, C),
        "w_value": normal(N, V, C),
        # Row 0 sees its first positions only, which one device holds; row 1 nearly all.
        "positions": jnp.asarray([[0, 1, 2, 3], [57, 58, 59, 60]], jnp.int32),
        "filled": jnp.asarray(61, jnp.int32),
    }
    held, free = ("batch", "positions", None), ("batch", None, None)
    axes = {"q": ("batch", None, "heads", None), "latents": held, "w_key": ("heads", None, None)}
    axes |= {"w_value": ("heads", None, None), "positions": ("batch", None), "since": ("batch", None), "filled": ()}
    index = {"index_q": normal(B, tokens, 3, 8), "index_k": normal(B, S, 8), "index_weight": normal(B, tokens, 3)}
    index_axes = {"index_q": (*free, None), "index_k": held, "index_weight": free}
    return arrays, axes, index, index_axes


SINCE = [[0, 0, 2, 2], [0, 50, 59, 60]]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("tokens", "since"), [(1, None), (4, None), (4, SINCE)], ids=["one", "four", "documents"])
def test_attention_over_positions(attention, mesh, tokens, since):
    arrays, axes, _, _ = attention
    arrays = arrays | {name: arrays[name][:, -tokens:] for name in ("q", "positions")}
    arrays |= {} if since is None else {"since": jnp.asarray(since, jnp.int32)}
    wanted = _dense(0, None, None, **arrays)

    @jax.jit
    def spread(arrays):
        with on_mesh(make_mesh(mesh)):
            return over_positions(_dense, arrays, axes, S, ("batch", None, "heads", None))

    close(spread(arrays), wanted)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("equal", [False, True], ids=["random, documents", "all scores equal"])
def test_indexed_attention_over_positions(attention, mesh, equal):
    """Of equal scores the lower position wins, whichever device holds it."""
    arrays, axes, index, index_axes = attention
    arrays |= {} if equal else {"since": jnp.asarray(SINCE, jnp.int32)}
    index = index | {"index_k": jnp.zeros_like(index["index_k"])} if equal else index

    def attend(*arguments, **named):
        return _indexed(*arguments, **named, top_k=12)

    wanted = attend(0, None, None, **arrays, **index)

    @jax.jit
    def spread(arrays):
        with on_mesh(make_mesh(mesh)):
            return over_positions(attend, arrays, axes | index_axes, S, ("batch", None, "heads", None))

    close(spread(arrays | index), wanted)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_new_entries_go_to_the_device_that_holds_their_position(mesh):
    rng = np.random.default_rng(1)
    buffer, new = (jnp.asarray(rng.normal(size=(B, size, 3)), jnp.float32) for size in (S, 6))
    # Over the border of two devices; at the end, with the last two beyond it.
    positions = jnp.asarray([[5, 6, 7, 8, 9, 10], [60, 61, 62, 63, 64, 65]], jnp.int32)
    real = jnp.asarray([[True] * 5 + [False], [True] * 6])

    @jax.jit
    def spread(*arrays):
        with on_mesh(make_mesh(mesh)):
            return write_positions(write_rows, *arrays)

    found = np.asarray(spread(buffer, new, positions, real))
    wanted = np.array(buffer)
    wanted[0, 5:10] = new[0, :5]
    wanted[1, 60:64] = new[1, :4]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("mesh", "documents"), [(MESHES[0], SEVERAL), (MESHES[1], SEVERAL), (MESHES[1], None)], ids=["8", "2", "2, one"]
)
def test_recurrence_over_tokens(mesh, documents):
    """Against the chunk form on one device, from a state, K ≠ V, padding behind row 1, decays from none to all.

    Documents begin at the start of a device's tokens and inside, more than one of them, and go on over several.
    """
    rng = np.random.default_rng(2)
    tokens, keys, values = 64, 8, 12

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q, k, v = normal(B, tokens, N, keys), normal(B, tokens, N, keys), normal(B, tokens, N, values)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -np.exp(rng.uniform(-6, 1, (B, tokens, N, keys))).astype(np.float32)
    g[:, 20] = -100
    beta = rng.uniform(0, 1, (B, tokens, N)).astype(np.float32)
    g[1, 37:], beta[1, 37:] = 0, 0
    arguments = (q, k, v, g, beta, normal(B, N, keys, values))
    if documents is not None:
        begins = np.zeros((B, tokens), bool)
        for row, places in enumerate(documents):
            begins[row, places] = True
        arguments += (begins,)
    out, state = kda_chunked(*map(jnp.asarray, arguments))

    @jax.jit
    def spread(*arguments):
        with on_mesh(make_mesh(mesh)):
            return over_tokens(kda_chunked, *arguments)

    found, found_state = spread(*arguments)
    close(found, out, 2e-5)
    close(found_state, state, 2e-5)
