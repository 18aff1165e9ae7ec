from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.grouped_matmul import expert_matrix, grouped_matmul, grouped_matmul_reference

OUT, IN = 5, 64
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

tiled = jax.jit(grouped_matmul)
plain = jax.jit(grouped_matmul_reference)


def random_experts(count, packed, out=OUT, into=IN):
    """The arrays as a checkpoint has them, and the same in float64 `[E, O, I]`."""
    rng = np.random.default_rng(count)
    if not packed:
        weight = rng.normal(size=(count, out, into)).astype(np.float32)
        return {"weight": weight}, weight.astype(np.float64)
    codes = rng.integers(0, 16, (count, out, into))
    scale = rng.integers(124, 130, (count, out, into // 32)).astype(np.uint8)
    arrays = {"weight_packed": (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8), "weight_scale": scale}
    return arrays, CODES[codes] * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=-1)


def check(form, rows, total, packed, sizes):
    """Against a loop over rows; the rows behind the last group are NaN and must come out zero."""
    arrays, matrices = random_experts(len(sizes), packed)
    x = np.full((rows, IN), np.nan, np.float32)
    x[:total] = np.random.default_rng(rows).normal(size=(total, IN))
    wanted = np.zeros((rows, OUT))
    for expert, (start, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        for row in range(start, end):
            wanted[row] = matrices[expert] @ x[row].astype(np.float64)
    found = form(x, arrays, np.array(sizes, np.int32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max(initial=1))
    np.testing.assert_array_equal(found[total:], 0)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("form", [tiled, plain], ids=["tiled", "plain"])
@pytest.mark.parametrize(
    "sizes",
    [
        (8, 0, 8, 0),
        (0, 8, 0, 8),
        (0, 0, 0, 0),
        (64, 0, 0, 0),
        (0, 0, 0, 64),
        (0, 63, 0, 0),
        (1, 7, 8, 9),
        (31, 1, 31, 1),
        (16, 16, 16, 16),
        (33, 0, 30, 1),
    ],
    ids=str,
)
def test_64_rows_of_four_experts(form, packed, sizes):
    """Tiles have 32 rows here."""
    check(form, 64, sum(sizes), packed, sizes)


@pytest.mark.parametrize(
    "sizes",
    [(255, 257, 88), (257, 255, 1), (256, 256, 88), (1, 599, 0), (0, 0, 600), (7, 8, 9), (300, 0, 300)],
    ids=str,
)
def test_groups_around_the_largest_tile(sizes):
    """600 rows, tiles of 256."""
    check(tiled, 600, sum(sizes), True, sizes)


@pytest.mark.parametrize("sizes", [(1, 7, 8, 9, 0, 1, 0, 8), (9, 0, 0, 0, 0, 0, 17, 8), (0,) * 7 + (34,)], ids=str)
def test_groups_around_the_smallest_tile(sizes):
    """34 rows of 8 experts, tiles of 8."""
    check(tiled, 34, sum(sizes), False, sizes)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_fewer_rows_than_a_tile(rows):
    for sizes in {(rows, 0), (0, rows), (0, 0), (rows // 2, rows - rows // 2)}:
        check(tiled, rows, sum(sizes), True, sizes)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_expert_matrix(packed):
    arrays, matrices = random_experts(4, packed)
    found = expert_matrix(jax.tree.map(jnp.asarray, arrays), jnp.array(2), jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(found, matrices[2])


def test_results_have_the_dtype_of_the_rows():
    """Small whole numbers are exact in bfloat16 too."""
    weights = {"weight": jnp.ones((2, 3, 4), jnp.float32) * jnp.array([1.0, 2.0])[:, None, None]}
    found = tiled(jnp.ones((3, 4), jnp.bfloat16), weights, jnp.array([2, 1]))
    assert found.dtype == jnp.bfloat16
    assert found.tolist() == [[4] * 3, [4] * 3, [8] * 3]


@pytest.mark.parametrize("stacked", [False, True], ids=["one layer", "of two layers"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients(packed, stacked):
    """Against those of the plain form, taken by JAX; packed weights are constants."""
    sizes = jnp.array([3, 0, 9, 5], jnp.int32)
    arrays, _ = random_experts(4, packed)
    weights = jax.tree.map(jnp.asarray, arrays)
    if stacked:
        weights = {name: jnp.stack([jnp.zeros_like(x), x]) for name, x in weights.items()} | {"layer": jnp.array(1)}
    floating = {name: x for name, x in weights.items() if name == "weight"}
    rng = np.random.default_rng(5)
    rows, pull = (jnp.asarray(rng.normal(size=(20, n)), jnp.float32) for n in (IN, OUT))

    def loss(form, rows, floating):
        return jnp.sum(form(rows, weights | floating, sizes) * pull)

    with jax.default_matmul_precision("highest"):
        found, wanted = (jax.grad(loss, argnums=(1, 2))(form, rows, floating) for form in (grouped_matmul, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), found, wanted)
    np.testing.assert_array_equal(found[0][17:], 0)
