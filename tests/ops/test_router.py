import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.router import choose_experts, expert_weights, router_scores


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def loop_choice(scores, bias, count, num_groups=1, top_groups=1):
    """Expert by expert in float64; sorting is stable, so of equal ones the lower number comes first."""
    chosen = []
    for row in np.asarray(scores, np.float64):
        biased = [float(s) + float(b) for s, b in zip(row, bias, strict=True)]
        allowed = range(len(biased))
        if num_groups > top_groups:
            size = len(biased) // num_groups
            rank = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
            best = sorted(range(num_groups), key=lambda g: -rank[g])[:top_groups]
            allowed = [e for e in allowed if e // size in best]
        chosen.append(sorted(allowed, key=lambda e: -biased[e])[:count])
    return np.array(chosen)


@pytest.fixture(scope="module")
def many():
    """896 experts: inputs `[256, 256]`, router `[896, 256]`, bias, and the scores in float64."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 256)).astype(np.float32)
    weight = (rng.normal(size=(896, 256)) / 16).astype(np.float32)
    bias = (0.05 * rng.normal(size=896)).astype(np.float32)
    return x, weight, bias, sigmoid(x.astype(np.float64) @ weight.T.astype(np.float64))


def test_16_of_896_experts_as_float64_chooses_them(many):
    x, weight, bias, wanted = many
    scores = router_scores(jnp.asarray(x), jnp.asarray(weight), "sigmoid")
    np.testing.assert_allclose(scores, wanted, rtol=1e-5)
    chosen = choose_experts(scores, jnp.asarray(bias), 16)
    np.testing.assert_array_equal(np.sort(chosen), np.sort(loop_choice(wanted, bias, 16)))


def test_the_bias_is_not_rounded_to_bfloat16(many):
    """A bias near 8 whose differences bfloat16 would lose; then one constant less, which changes nothing."""
    *_, scores = many
    scores = jnp.asarray(np.round(scores * 1024) / 1024, jnp.float32)  # so that adding 8 is exact
    bias = np.round(8 * 1024 + 20 * np.random.default_rng(1).normal(size=896)) / 1024
    chosen = choose_experts(scores, jnp.asarray(bias, jnp.float32), 16)
    np.testing.assert_array_equal(chosen, loop_choice(scores, bias, 16))
    np.testing.assert_array_equal(chosen, choose_experts(scores, jnp.asarray(bias - 8, jnp.float32), 16))


def test_scores_of_bfloat16_inputs_are_float32():
    """Products and sums of the bfloat16 numbers as they are: 1 + 2⁻⁹ would round to 1."""
    x = jnp.array([[1.0, 2.0**-9]], jnp.bfloat16)
    weight = jnp.array([[1.0, 1.0], [1.0, 0.0]], jnp.bfloat16)
    scores = router_scores(x, weight, "sigmoid")
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores[0], sigmoid(np.array([1 + 2.0**-9, 1.0])), rtol=1e-6)


def test_softmax_scores_are_over_all_experts():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(5, 8)).astype(np.float32), rng.normal(size=(6, 8)).astype(np.float32)
    raw = np.exp(x.astype(np.float64) @ weight.T.astype(np.float64))
    wanted = raw / raw.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(router_scores(jnp.asarray(x), jnp.asarray(weight), "softmax"), wanted, rtol=2e-6)


@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 4), (4, 1), (4, 2), (6, 3), (2, 1)])
@pytest.mark.parametrize("shift", [0.0, -3.0])
def test_groups(num_groups, top_groups, shift):
    """With −3 added all biased scores are negative: a mask of 0 would choose the experts that are shut out."""
    rng = np.random.default_rng(num_groups)
    scores = rng.uniform(size=(200, 12)).astype(np.float32)
    bias = (rng.normal(size=12) * 0.3 + shift).astype(np.float32)
    found = choose_experts(jnp.asarray(scores), jnp.asarray(bias), 3, num_groups, top_groups)
    np.testing.assert_array_equal(found, loop_choice(scores, bias, 3, num_groups, top_groups))


def test_a_group_is_ranked_by_its_two_best():
    """Group 0 has the best expert, group 1 the best three, group 2 the best pair."""
    scores = jnp.array([[0.9, 0.0, 0.0, 0.5, 0.5, 0.5, 0.6, 0.55, 0.0]])
    assert choose_experts(scores, jnp.zeros(9), 2, 3, 1).tolist() == [[6, 7]]


@pytest.mark.parametrize("groups", [(1, 1), (3, 2), (3, 1)])
def test_of_equal_experts_the_lower_number_wins(groups):
    """Rows repeat, so that ties are exact; compiled or not."""
    scores = jnp.tile(jnp.array([[0.5, 0.75]]), (1, 6))
    wanted = {1: [1, 3, 0], 2: [1, 3, 5]}[groups[1]] if groups[0] == 3 else [1, 3, 5]
    for choose in (choose_experts, jax.jit(choose_experts, static_argnums=(2, 3, 4))):
        assert choose(scores, jnp.zeros(12), 3, *groups).tolist() == [wanted]


def test_the_bias_chooses_but_does_not_weigh():
    rng = np.random.default_rng(0)
    scores = rng.uniform(0.1, 0.9, (7, 12)).astype(np.float32)
    bias = np.zeros(12, np.float32)
    bias[[2, 5, 6, 11]] = 100
    index = choose_experts(jnp.asarray(scores), jnp.asarray(bias), 4)
    np.testing.assert_array_equal(np.sort(index), np.tile([2, 5, 6, 11], (7, 1)))
    weights = expert_weights(jnp.asarray(scores), index, renormalize=True, scaling_factor=1.0)
    for row, chosen, found in zip(scores.astype(np.float64), np.asarray(index), weights, strict=True):
        np.testing.assert_allclose(found, row[chosen] / sum(row[chosen]), rtol=1e-6)


@pytest.mark.parametrize(
    ("renormalize", "factor", "index", "wanted"),
    [
        (True, 1.0, [3, 0], [0.8, 0.2]),
        (True, 2.446, [3, 0], [0.8 * 2.446, 0.2 * 2.446]),
        (False, 2.446, [3, 0], [0.4 * 2.446, 0.1 * 2.446]),
        (True, 2.0, [2], [0.6]),  # a single expert keeps its score
    ],
)
def test_weights(renormalize, factor, index, wanted):
    scores = jnp.array([[0.1, 0.2, 0.3, 0.4]])
    found = expert_weights(scores, jnp.array([index]), renormalize, factor)
    np.testing.assert_allclose(found, [wanted], rtol=1e-6)


@pytest.mark.parametrize(("logit", "wanted"), [(-20.0, 1 / 16), (-60.0, 8.7565e-7), (-100.0, 0.0)])
def test_renormalising_scores_that_vanish(logit, wanted):
    """The denominator is Σ + 1e-20: at −60 the sum is 1.4e-25, at −100 it may be 0."""
    scores = router_scores(jnp.ones((1, 1)), jnp.full((20, 1), logit), "sigmoid")
    weights = expert_weights(scores, choose_experts(scores, jnp.zeros(20), 16), True, 1.0)
    np.testing.assert_allclose(weights, np.full((1, 16), wanted), rtol=1e-4, atol=1e-22)
