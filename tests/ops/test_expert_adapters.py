"""Adapters of the routed experts: values and gradients on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_adapters import (
    EXPERTS,
    activate,
    adapters,
    assert_trees_close,
    base,
    pulls,
    random_tokens,
    wanted_gradients,
    with_adapters,
)
from jax.extend.core import jaxprs_in_params

from kimi_jax.ops.grouped_matmul import grouped_matmul
from kimi_jax.ops.routed_experts import adapted_matmul, routed_experts


@jax.jit
def gradients(arguments, index, fixed, pull):
    """The sums, and the gradients of (z, weight, floating arrays of the experts) beside the `fixed` ones."""

    def call(z, weight, own):
        experts = with_adapters({name: {**x, **own[name]} for name, x in fixed.items()}, own)
        return routed_experts(z, index, weight, experts, 0, activate)

    value, back = jax.vjp(call, *arguments)
    return value, back(pull)


def in_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.fixture(scope="module")
def tokens():
    """Two rows of padding, whose numbers are NaN."""
    z, index, weight = random_tokens(24)
    index[[3, 20]], z[[3, 20]] = EXPERTS, np.nan
    return z, index, weight


@pytest.fixture(scope="module")
def wanted(tokens):
    return wanted_gradients(*tokens)


def two_layers():
    """The packed base as the second layer of a stack, which comes whole; the adapters are those of that layer."""
    packed = jax.tree.map(lambda x: np.stack([255 - x, x]), base()[0])
    return {name: {**x, "layer": np.int32(1)} for name, x in packed.items()}


@pytest.fixture(scope="module")
def found(tokens):
    z, index, weight = tokens
    with jax.enable_x64(True):
        arguments = in_float64((z, weight, adapters()))
        return jax.tree.map(np.asarray, gradients(arguments, index, two_layers(), pulls(z)))


@pytest.mark.xdist_group("float64")
def test_gradients_equal_those_of_the_unpacked_base(found, wanted):
    value, (*expected, _) = wanted
    assert_trees_close(found, (value, tuple(expected)), 1e-9)


@pytest.mark.xdist_group("float64")
def test_gradients_equal_finite_differences(tokens, found):
    """In a direction of each array alone, over the packed base."""
    z, index, weight = tokens
    leaves, tree = jax.tree.flatten(in_float64((np.nan_to_num(z), weight, adapters())))
    with jax.enable_x64(True):

        def loss(changed):
            return float(np.sum(gradients(tree.unflatten(changed), index, two_layers(), pulls(z))[0] * pulls(z)))

        for i, slope in enumerate(jax.tree.leaves(found[1])):
            step = 1e-5 * np.random.default_rng(i).normal(size=slope.shape)
            above, below = ([x + sign * step if i == n else x for n, x in enumerate(leaves)] for sign in (1, -1))
            np.testing.assert_allclose((loss(above) - loss(below)) / 2, np.sum(slope * step), rtol=1e-6)


@pytest.mark.xdist_group("float64")
def test_experts_nobody_chose_have_no_gradient(tokens, found):
    """Exactly none; and NaN in rows of padding has stayed there."""
    _, index, _ = tokens
    _, (to_z, to_weight, to_own) = found
    used = np.unique(index[index < EXPERTS])
    assert EXPERTS - 1 not in used
    for x in jax.tree.leaves(to_own):
        np.testing.assert_array_equal(np.flatnonzero(np.any(x != 0, axis=(1, 2))), used)
    np.testing.assert_array_equal(np.any(to_z != 0, axis=1), index[:, 0] < EXPERTS)
    np.testing.assert_array_equal(to_weight[3], 0)


@jax.jit
def one_projection(rows, weights, own, sizes):
    """The product, and the gradients of the adapter for a gradient of ones."""
    out, back = jax.vjp(lambda own: adapted_matmul(rows, {**weights, **own}, sizes), own)
    return out, back(jnp.ones_like(out))[0]


def test_bfloat16_rows_lose_only_their_own_rounding():
    """301 rows of ones: a number that bfloat16 does not have, but the gradient."""
    rows, sizes = jnp.ones((301, 4), jnp.bfloat16), jnp.array([0, 301])
    weights = {"weight": jnp.ones((2, 3, 4)), "lora_scale": jnp.float32(1 / 3)}
    own = {"lora_A": jnp.ones((2, 2, 4)), "lora_B": jnp.ones((2, 3, 2))}
    out, found = one_projection(rows, weights, own, sizes)
    third = float(jnp.bfloat16(1 / 3))  # what goes back is rounded as the rows are
    np.testing.assert_array_equal(out, jnp.full((301, 3), 4 + 8 / 3, jnp.bfloat16))
    assert {x.dtype for x in found.values()} == {jnp.dtype(jnp.float32)}
    for name, times in (("lora_A", float(jnp.bfloat16(3 * third))), ("lora_B", 4 * third)):
        wanted = np.zeros_like(own[name])
        wanted[1] = 301 * times
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6)


def test_an_adapter_that_starts_at_zero_changes_no_bit():
    rng = np.random.default_rng(0)
    rows, matrices, into = (rng.normal(size=shape) for shape in ((301, 4), (2, 3, 4), (2, 2, 4)))
    weights = {"weight": jnp.asarray(matrices, jnp.float32), "lora_scale": jnp.float32(1 / 3)}
    own = {"lora_A": jnp.asarray(into, jnp.float32), "lora_B": jnp.zeros((2, 3, 2))}
    rows, sizes = jnp.asarray(rows, jnp.bfloat16), jnp.array([100, 201])
    found, _ = one_projection(rows, weights, own, sizes)
    wanted = jax.jit(grouped_matmul)(rows, {"weight": weights["weight"]}, sizes)
    np.testing.assert_array_equal(found, wanted)


def every_array(jaxpr):
    """Of a program and the programs inside it: what every step makes."""
    for step in jaxpr.eqns:
        yield from (x.aval for x in step.outvars)
        for inner in jaxprs_in_params(step.params):
            yield from every_array(inner)


def test_no_unpacked_copy_of_the_base_and_nothing_of_rows_times_experts(tokens):
    z, index, weight = tokens
    packed = {name: {key: np.concatenate([x] * 8) for key, x in arrays.items()} for name, arrays in base()[0].items()}
    own = {name: {key: np.concatenate([x] * 8) for key, x in arrays.items()} for name, arrays in adapters().items()}
    program = jax.make_jaxpr(gradients)((z, weight, own), index, packed, z)
    made = {x.shape: x for x in every_array(program.jaxpr)}
    copies, experts = index.size, 8 * EXPERTS
    largest = max(x.size for x in jax.tree.leaves(own))
    assert (64, 16) in made  # one expert's bytes, cut out inside the innermost loop
    assert max(x.size for x in made.values()) == largest < packed["w1"]["weight_packed"].size
    assert not [x for x in made if copies in x and experts in x]
