"""Gradients through both strategies of expert parallelism: of rows, weights and adapters, over either base."""

import jax
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

from kimi_jax.ops.routed_experts import routed_experts
from kimi_jax.parallel.expert_parallel import expert_parallel
from kimi_jax.parallel.mesh import make_mesh
from kimi_jax.parallel.sharding import on_mesh

CASES = {
    "data8-dispatch-floating": ({"data": 8}, (8, 4)),
    "data2,tensor4-gather-packed": ({"data": 2, "tensor": 4}, (8, 4)),
    "data2,tensor4-dispatch-packed": ({"data": 2, "tensor": 4}, (8, 4)),
}


def apply(rows, index, weight, experts, first):
    return routed_experts(rows, index, weight, experts, first, activate)


@pytest.fixture(scope="module", params=[pytest.param(case, marks=pytest.mark.xdist_group(case)) for case in CASES])
def spread(request):
    """Number of rows, and a function of (z, index, weight): sums, gradients of z, weight, adapters, floating base."""
    axes, shape = CASES[request.param]
    _, strategy, kind = request.param.split("-")
    mesh = make_mesh(axes)
    packed, full = base()
    own = {name: {**x, "weight": full[name].astype(np.float32)} for name, x in adapters().items()}
    fixed, own = (packed, adapters()) if kind == "packed" else ({name: {} for name in own}, own)

    @jax.jit
    def gradients(arguments, index, fixed, pull):
        def call(z, weight, own):
            experts = with_adapters(fixed, own)
            return expert_parallel(apply, z, index, weight, experts, EXPERTS)

        value, back = jax.vjp(call, *arguments)
        return value, back(pull)

    def call(z, index, weight):
        arrays = (x.reshape((*shape, -1)) for x in (z, index, weight, pulls(z).astype(np.float32)))
        with on_mesh(mesh, strategy):
            z, index, weight, pull = arrays
            value, (to_z, to_weight, to_own) = gradients((z, weight, own), index, fixed, pull)
        value, to_z, to_weight = (np.reshape(x, (shape[0] * shape[1], -1)) for x in (value, to_z, to_weight))
        return value, (to_z, to_weight, to_own)

    return shape[0] * shape[1], call


@pytest.mark.parametrize("choice", ["random", "padding", "two experts", "one expert"])
def test_gradients_equal_those_of_the_unpacked_base(spread, choice):
    """In float32 on many devices, in float64 on one. Two experts, those of the first of eight: several rounds."""
    rows, call = spread
    z, index, weight = random_tokens(rows)
    if choice == "padding":
        index[[1, 2, 7]], z[[1, 2, 7]] = EXPERTS, np.nan
    elif choice != "random":
        index = index % 2 if choice == "two experts" else np.full_like(index, EXPERTS - 2)
    value, (to_z, to_weight, to_own, to_base) = wanted_gradients(z, index, weight)
    found = call(z, index, weight)
    if "weight" in found[1][2]["w1"]:
        to_own = {name: {**x, "weight": to_base[name]} for name, x in to_own.items()}
    assert_trees_close(found, (value, (to_z, to_weight, to_own)), 3e-6)
    unused = np.setdiff1d(np.arange(EXPERTS), index)
    for x in jax.tree.leaves(found[1][2]):
        assert x.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(x)[unused], 0)
