"""Kimi Delta Attention against a token-by-token loop in NumPy float64.

One batch holds every kind of decay and initial state (a row each) and of keys (a head each); errors are scored
by row and head.
"""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.kda import gated_rms_norm, invert_unit_lower, kda_chunked, kda_recurrent, kda_step, log_decay

K, V = 16, 24
ROWS = tuple(product((-100.0, -5.0, -1.0, -1e-4, "mixed", "uniform"), ("from zero", "continued")))
HEADS = ("random keys", "equal keys")
LENGTHS = (1, 15, 16, 17, 64, 65, 128, 500)
NAMES = ("q", "k", "v", "g", "beta", "state")
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes nearly all of the time here
if jax.__version_info__ < (0, 11):  # newer ones compile faster and have no such option
    QUICK["xla_cpu_use_fusion_emitters"] = False

pytestmark = pytest.mark.xdist_group("kda")  # compiled functions are shared


@cache
def inputs(tokens):
    """`(q, k, v, g, beta, state), (cotangents of outputs and state)`."""
    rng = np.random.default_rng(tokens)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    shape = (len(ROWS), tokens, len(HEADS), K)
    q, k = unit(rng.normal(size=shape)) * K**-0.5, unit(rng.normal(size=shape))
    k[:, :, HEADS.index("equal keys")] = k[:, :1, HEADS.index("equal keys")]
    v, beta = rng.normal(size=(*shape[:3], V)), rng.uniform(0.02, 1, shape[:3])
    g, state = np.empty(shape), rng.normal(size=(len(ROWS), len(HEADS), K, V))
    for row, (decay, start) in enumerate(ROWS):
        if decay == "mixed":
            g[row] = rng.choice([-100, -5, -1, -1e-4], shape[1:])
        else:
            g[row] = rng.uniform(-5, 0, shape[1:]) if decay == "uniform" else decay
        if start == "from zero":
            state[row] = 0
    cotangents = rng.normal(size=v.shape), rng.normal(size=state.shape)
    return jax.tree.map(lambda x: x.astype(np.float32), ((q, k, v, g, beta, state), cotangents))


def loop(q, k, v, g, beta, state):
    """The recurrence of the specification, a token at a time."""
    q, k, v, g, beta, state = (np.array(x, np.float64) for x in (q, k, v, g, beta, state))
    out = np.empty_like(v)
    for b, n in np.ndindex(state.shape[:2]):
        S = state[b, n]
        for t in range(v.shape[1]):
            S = np.diag(np.exp(g[b, t, n])) @ S
            S = S + beta[b, t, n] * np.outer(k[b, t, n], v[b, t, n] - S.T @ k[b, t, n])
            out[b, t, n] = S.T @ q[b, t, n]
        state[b, n] = S
    return out, state


def value_and_gradients(form):
    """`f(arguments, cotangents)` -> (outputs, state), gradients of all six arguments."""

    @partial(jax.jit, compiler_options=QUICK)
    def both(arguments, cotangents):
        value, pull = jax.vjp(form, *arguments)
        return value, pull(cotangents)

    return lambda *given: jax.tree.map(np.asarray, both(*given))


chunk_form, padded_step_form = value_and_gradients(kda_chunked), value_and_gradients(kda_recurrent)


def cut(tree, at, end):
    """Tokens `at…end` of arguments and cotangents as `inputs` gives them."""
    (*arguments, state), (out, last) = tree
    return (*(x[:, at:end] for x in arguments), state), (out[:, at:end], last)


def step_form(arguments, cotangents):
    """As `chunk_form`; behind the tokens come zeros, which change nothing, so that few shapes are compiled."""
    tokens = arguments[0].shape[1]

    def pad(x):
        return np.pad(x, [(0, 0), (0, (128 if tokens <= 128 else 500) - tokens)] + [(0, 0)] * (x.ndim - 2))

    arguments = (*map(pad, arguments[:5]), arguments[5])
    (out, state), gradients = padded_step_form(arguments, (pad(cotangents[0]), cotangents[1]))
    return (out[:, :tokens], state), (*(x[:, :tokens] for x in gradients[:5]), gradients[5])


@cache
def chunked(tokens):
    return chunk_form(*inputs(tokens))


@cache
def stepped(tokens):
    return step_form(*inputs(tokens))


def assert_close(actual, wanted, tolerance, name="outputs"):
    """max|a − b| ≤ tolerance · max|b| in every head of every row."""
    head = 1 if name == "state" else 2
    axes = tuple(i for i in range(1, wanted.ndim) if i != head)
    error, size = (np.max(np.abs(x), axis=axes) for x in (actual - wanted, wanted))
    wrong = ~(error <= tolerance * size + 1e-30)  # compiled code flushes subnormal numbers
    found = [(*ROWS[b], HEADS[n], f"{error[b, n]:.3g} of {size[b, n]:.3g}") for b, n in np.argwhere(wrong)]
    assert not found, f"{name}: {found}"


def assert_values_close(actual, wanted, tolerance=2e-5):
    for name, a, b in zip(("outputs", "state"), actual, wanted, strict=True):
        assert_close(a, b, tolerance, name)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunk_form_and_its_gradients_equal_those_of_the_step_form(tokens):
    (value, gradients), (wanted, wanted_gradients) = chunked(tokens), stepped(tokens)
    assert_values_close(value, wanted)
    for name, a, b in zip(NAMES, gradients, wanted_gradients, strict=True):
        assert_close(a, b, 1e-4, name)


@pytest.mark.parametrize("tokens", [1, 17, 128])
@pytest.mark.parametrize("form", [chunked, stepped])
def test_both_forms_equal_the_float64_loop(form, tokens):
    assert_values_close(form(tokens)[0], loop(*inputs(tokens)[0]))


def test_what_earlier_tokens_contribute_scored_by_itself():
    """Odd tokens write no value of their own, so that their outputs hold nothing of the large diagonal."""
    arguments, cotangents = inputs(128)
    v = arguments[2] * (np.arange(128) % 2 == 0)[None, :, None, None].astype(np.float32)
    arguments = (*arguments[:2], v, *arguments[3:])
    (out, _), _ = chunk_form(arguments, cotangents)
    assert_close(out[:, 1::2], loop(*arguments)[0][:, 1::2], 2e-5)


@pytest.mark.parametrize("pieces", [(64, 64), (63, 65), (1, 63, 64), (65, 1, 15, 16, 17, 2, 2, 2, 2, 2, 2, 2)])
def test_any_split_gives_the_same_outputs_and_state(pieces):
    outs, at, state = [], 0, inputs(128)[0][5]
    for size in pieces:
        (*part, _), cotangents = cut(inputs(128), at, at + size)
        (out, state), _ = chunk_form((*part, state), cotangents)
        outs.append(out)
        at += size
    assert at == 128
    assert_values_close((np.concatenate(outs, axis=1), state), chunked(128)[0])


def test_padding_leaves_the_state_as_it_is():
    """65 real tokens, then 63 with g = 0 and beta = 0 and anything for q, k and v."""
    (q, k, v, g, beta, state), cotangents = inputs(128)
    real = (np.arange(128) < 65).astype(np.float32)
    padded = q, k, v, g * real[None, :, None, None], beta * real[None, :, None], state
    (out, last), _ = chunk_form(padded, cotangents)
    assert_values_close((out[:, :65], last), chunk_form(*cut(inputs(128), 0, 65))[0], 1e-6)


# Several documents a row: the first of them goes on from the state in every second pair of rows, and begins in others.
DOCUMENTS = ((1, 3, 15, 64, 65, 100, 70), (100, 65, 64, 15, 3, 1, 70))  # 318 tokens, more than a span
FIRST_BEGINS = (True, False)


def documents():
    """What `inputs` gives, cut to the documents' tokens, and which of these begin one."""
    begins = np.zeros((len(ROWS), sum(DOCUMENTS[0])), bool)
    for row in range(len(ROWS)):
        kind = row // 2 % 2
        begins[row, np.cumsum((0, *DOCUMENTS[kind]))[:-1]] = True
        begins[row, 0] = FIRST_BEGINS[kind]
    return cut(inputs(500), 0, begins.shape[1]), begins


def each_document_alone():
    """Values and gradients as `chunk_form` gives them, of a call for each document, padded to 128 tokens."""
    (arguments, cotangents), _ = documents()
    (*tokens, state), (to_out, to_state) = arguments, cotangents
    out, gradients, last = np.zeros_like(to_out), [np.zeros_like(x) for x in arguments], np.zeros_like(to_state)
    for number in range(len(DOCUMENTS[0])):
        places = [slice(sum(DOCUMENTS[row // 2 % 2][:number]), None) for row in range(len(ROWS))]
        places = [slice(p.start, p.start + DOCUMENTS[row // 2 % 2][number]) for row, p in enumerate(places)]

        def own(x, places=places):
            padded = np.zeros((len(ROWS), 128, *x.shape[2:]), x.dtype)
            for row, place in enumerate(places):
                padded[row, : place.stop - place.start] = x[row, place]
            return padded

        from_state = np.array([number == 0 and not FIRST_BEGINS[row // 2 % 2] for row in range(len(ROWS))])
        at_end = np.float32(number == len(DOCUMENTS[0]) - 1)
        start = state * from_state[:, None, None, None].astype(np.float32)
        (part, last), back = chunk_form((*map(own, tokens), start), (own(to_out), to_state * at_end))
        for whole, piece in zip((out, *gradients[:5]), (part, *back[:5]), strict=True):
            for row, place in enumerate(places):
                whole[row, place] = piece[row, : place.stop - place.start]
        gradients[5][from_state] = back[5][from_state]
    return (out, last), gradients


def test_documents_in_one_row_are_as_each_alone():
    """Of 1 to 100 tokens, over the borders of chunks and spans; no decay is strong enough to separate them."""
    ((*tokens, state), cotangents), begins = documents()
    wanted, wanted_gradients = each_document_alone()

    def packed(*arguments):
        return kda_chunked(*arguments, jnp.asarray(begins))

    value, gradients = value_and_gradients(packed)((*tokens, state), cotangents)
    assert_values_close(value, wanted)
    for name, a, b in zip(NAMES, gradients, wanted_gradients, strict=True):
        assert_close(a, b, 1e-4, name)
    stepped = jax.jit(kda_recurrent, compiler_options=QUICK)(*tokens, state, begins)
    assert_values_close(jax.tree.map(np.asarray, stepped), wanted)


def test_float64_stays_float64():
    arguments = inputs(17)[0]
    with jax.enable_x64(True):
        for form in (kda_chunked, kda_recurrent):
            value = jax.jit(form, compiler_options=QUICK)(*(x.astype(np.float64) for x in arguments))
            assert {x.dtype for x in value} == {jnp.dtype(jnp.float64)}
            assert_values_close(value, loop(*arguments), 1e-13)


def test_a_step_decays_before_it_corrects():
    """One head, by hand: S = e^g·S₀; S += β·k⊗(v − Sᵀk); o = Sᵀq."""
    out, state = kda_step(
        q=jnp.array([[[1.0, 2.0]]]),
        k=jnp.array([[[1.0, 0.0]]]),
        v=jnp.array([[[10.0, 20.0, 30.0]]]),
        g=jnp.log(jnp.array([[[0.5, 1.0]]])),
        beta=jnp.array([[0.5]]),
        state=jnp.array([[[[2.0, 4.0, 6.0], [1.0, 1.0, 1.0]]]]),
    )
    np.testing.assert_allclose(state[0, 0], [[5.5, 11, 16.5], [1, 1, 1]], rtol=1e-6)
    np.testing.assert_allclose(out[0, 0], [7.5, 13, 18.5], rtol=1e-6)


# The gates


@pytest.mark.parametrize("lower_bound", [-5.0, -2.0, None])
def test_log_decay_per_head(lower_bound):
    """`A_log` differs from head to head, `dt_bias` from channel to channel."""
    rng = np.random.default_rng(0)
    heads, width = 3, 5
    raw = rng.normal(size=(2, 4, heads, width), scale=3).astype(np.float32)
    A_log = np.array([-1, 0.5, 2], np.float32)
    dt_bias = rng.normal(size=heads * width).astype(np.float32)
    wanted = np.empty(raw.shape)
    for b, t, n, j in np.ndindex(raw.shape):
        x, rate = float(raw[b, t, n, j]) + float(dt_bias[n * width + j]), np.exp(float(A_log[n]))
        if lower_bound is None:
            wanted[b, t, n, j] = -rate * np.log1p(np.exp(x))
        else:
            wanted[b, t, n, j] = lower_bound / (1 + np.exp(-rate * x))
    found = log_decay(*map(jnp.asarray, (raw, A_log, dt_bias)), lower_bound)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize(("lower_bound", "strongest"), [(-5.0, -5.0), (None, -1e4 * np.e)])
def test_log_decay_of_extreme_inputs_and_its_gradients_are_finite(lower_bound, strongest):
    raw = jnp.array([[[-1e4, 0.0, 1e4]]], jnp.bfloat16)

    def total(raw, A_log, dt_bias):
        found = log_decay(raw, A_log, dt_bias, lower_bound)
        return jnp.sum(found), found

    arguments = (raw, jnp.array([1.0]), jnp.zeros(3))
    (_, found), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*arguments)
    assert found.dtype == jnp.float32
    assert found[0, 0, 0] == 0
    np.testing.assert_allclose(found[0, 0, 2], strongest, rtol=3e-3)  # 1e4 in bfloat16 is 9984
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in gradients)


def test_gated_norm_is_per_head_and_gates_after_the_norm():
    rng = np.random.default_rng(1)
    x, gate = (rng.normal(size=(2, 3, 4)).astype(np.float32) * 0.01 for _ in range(2))
    gate *= 300
    weight = np.array([1, 2, -1, 0.5], np.float32)
    wanted = np.empty(x.shape)
    for b, n in np.ndindex(2, 3):
        row = x[b, n].astype(np.float64)
        rms = np.sqrt(sum(row**2) / 4 + 1e-5)
        wanted[b, n] = row / rms * weight / (1 + np.exp(-gate[b, n].astype(np.float64)))
    np.testing.assert_allclose(gated_rms_norm(*map(jnp.asarray, (x, gate, weight)), 1e-5), wanted, rtol=2e-6)


def test_gated_norm_of_bfloat16_is_computed_in_float32():
    x = jnp.array([[1.0, 2.0, 3.0]], jnp.bfloat16)
    found = gated_rms_norm(x, jnp.zeros_like(x), jnp.ones(3, jnp.bfloat16), 1e-5)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found[0], np.array([1, 2, 3]) / np.sqrt(14 / 3 + 1e-5) / 2, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 8, 64])
def test_inverse_of_a_unit_lower_triangular_matrix(n):
    """Random entries, and the all-ones triangle of equal keys with β = 1, whose inverse is −1 below the diagonal."""
    rng = np.random.default_rng(n)
    strict = np.tril(np.stack([rng.uniform(-0.3, 0.3, (n, n)), np.ones((n, n))]), -1).astype(np.float32)
    found = np.asarray(jax.jit(invert_unit_lower)(strict))
    wanted = np.linalg.inv(np.eye(n) + strict[0].astype(np.float64))
    np.testing.assert_allclose(found[0], wanted, atol=2e-6 * np.abs(wanted).max())
    np.testing.assert_array_equal(found[1], np.eye(n) - np.eye(n, k=-1))


def products(jaxpr):
    """Every matrix product of a jaxpr, those inside loops and choices among them."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from products(inner)


def test_no_factor_is_rounded_on_accelerators():
    """There a product's float32 factors are rounded unless it asks for the highest precision."""
    arguments = [jnp.zeros((1, 600, 2, 16))] * 4 + [jnp.zeros((1, 600, 2)), jnp.zeros((1, 2, 16, 16))]
    found = [eqn.params["precision"] for eqn in products(jax.make_jaxpr(kda_chunked)(*arguments).jaxpr)]
    assert len(found) > 10
    highest = jax.lax.Precision.HIGHEST
    assert set(found) == {(highest, highest)}


@pytest.mark.parametrize(("rows", "tokens"), [(1, 0), (0, 64)])
def test_nothing_gives_nothing(rows, tokens):
    qkvg = [jnp.zeros((rows, tokens, 2, 16))] * 4
    out, state = jax.jit(kda_chunked)(*qkvg, jnp.zeros((rows, tokens, 2)), jnp.ones((rows, 2, 16, 16)))
    assert out.shape == (rows, tokens, 2, 16)
    np.testing.assert_array_equal(state, np.ones((rows, 2, 16, 16)))
