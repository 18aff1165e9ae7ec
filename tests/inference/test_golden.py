"""The tiny checkpoints against the published code's outputs, within the limits of the golden data's README."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.model.call import make_call
from kimi_jax.model.model import computing

MODELS = ("tiny-k3", "tiny-kimi-linear", "tiny-k31")
WIDTH = 150  # every call is padded to the length of the golden sequence, so that a model and mesh compile once
PIECES = (1, 3, 17, 64, 65)


def grouped(names, meshes):
    """Cases of one model and mesh stay in one test process: they share compiled functions."""
    return [
        pytest.param(name, mesh, marks=pytest.mark.xdist_group(f"{name} {mesh}"), id=f"{name}-{mesh}")
        for name, mesh in product(names, meshes)
    ]


ON_ONE_DEVICE = pytest.mark.parametrize(("name", "mesh"), grouped(MODELS, ("one",)))


def relative_rms(got, want):
    return np.sqrt(np.mean(np.square(got - want)) / np.mean(np.square(want)))


def assert_logits(got, want):
    got = np.asarray(got)
    assert np.max(np.abs(got - want)) <= 2e-3
    assert relative_rms(got, want) <= 5e-5


def eight_rows(data):
    """Right-padded tokens `[8, WIDTH]`, lengths, and the logits at each row's last token."""
    sequence, logits = data["seq_input_ids"], data["seq_logits"]
    lengths = np.asarray([len(sequence), 3, 64, 101, 1, 17, 65, 119])
    tokens = np.zeros((8, WIDTH), np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = sequence[:length]
    want = logits[lengths - 1].copy()
    if "batch_input_ids" in data:
        tokens[1:4, :101] = data["batch_input_ids"]
        want[1:4] = data["batch_last_logits"]
    return tokens, lengths, want


@ON_ONE_DEVICE
def test_forward(name, mesh, tiny, golden):
    tokens, lengths, want = eight_rows(golden(name))
    logits = np.asarray(kj.forward(tiny(name, mesh), tokens, lengths))
    assert_logits(logits[0, : lengths[0]], golden(name)["seq_logits"])
    assert_logits(logits[np.arange(8), lengths - 1], want)


@pytest.fixture
def optimized_on_one_device(mesh, request):
    """Prefill and decode of every model as in use; on meshes as well it would double the time of compiling."""
    if mesh == "one":
        request.getfixturevalue("optimized")


@ON_ONE_DEVICE
@pytest.mark.usefixtures("optimized_on_one_device")
def test_prefill_at_once_and_in_pieces(name, mesh, tiny, golden):
    model, (tokens, lengths, want) = tiny(name, mesh), eight_rows(golden(name))
    logits, whole = kj.prefill(model, tokens, lengths, kj.init_cache(model, 8, 192))
    assert_logits(logits, want)

    pieces, done = kj.init_cache(model, 8, 192), np.zeros(8, int)
    for call in range(20):
        take = np.minimum([PIECES[(call + row) % 5] for row in range(8)], lengths - done)
        if not take.any():
            break
        part = np.zeros((8, WIDTH), np.int32)
        for row in range(8):
            part[row, : take[row]] = tokens[row, done[row] : done[row] + take[row]]
        done += take
        logits, pieces = kj.prefill(model, part, take, pieces)
        assert not np.any(np.asarray(logits)[take == 0])
        finished = (done == lengths) & (take > 0)
        if finished.any():
            assert_logits(np.asarray(logits)[finished], want[finished])
    assert (done == lengths).all()
    np.testing.assert_array_equal(pieces.lengths, lengths)
    for one, other in zip(jax.tree.leaves(whole.layers), jax.tree.leaves(pieces.layers), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-4)


@ON_ONE_DEVICE
@pytest.mark.usefixtures("optimized_on_one_device")
def test_greedy_continuation_token_by_token(name, mesh, tiny, golden):
    model, data = tiny(name, mesh), golden(name)
    prompt, new, want = data["greedy_prompt_ids"], data["greedy_new_ids"], data["greedy_logits"]
    tokens = np.zeros((8, WIDTH), np.int32)
    tokens[:, : len(prompt)] = prompt
    logits, cache = kj.prefill(model, tokens, [len(prompt)] * 8, kj.init_cache(model, 8, 192))
    for step, token in enumerate(new):
        assert_logits(logits, np.tile(want[step], (8, 1)))
        assert np.argmax(np.asarray(logits), axis=-1).tolist() == [token] * 8
        logits, cache = kj.decode(model, [token] * 8, cache)


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        pytest.param(
            name, mesh, strategy, marks=pytest.mark.xdist_group(f"{name} {mesh}"), id=f"{name}-{mesh}-{strategy}"
        )
        for name, mesh, strategy in (("tiny-k3", "one", "auto"), ("tiny-k31", "all2", "dispatch"))
    ],
)
def test_loop_context_and_expert_strategies(name, mesh, strategy, tiny, golden):
    """Layers in a loop, one prompt over several devices, tokens sent to their experts: prefill in two pieces, decode.

    In tiny-k3 only some rounds of a layer start a block of Attention Residuals. `tests/bench/golden.py` runs every mesh
    with every strategy, with and without the loop.
    """
    model, (tokens, lengths, want) = tiny(name, mesh, loop=True), eight_rows(golden(name))
    model = model.replace(spec=replace(model.spec, expert_strategy=strategy))
    first = np.minimum(lengths, 40)
    _, cache = kj.prefill(model, tokens, first, kj.init_cache(model, 8, 192))
    rest = np.zeros_like(tokens)
    for row, start in enumerate(first):
        rest[row, : lengths[row] - start] = tokens[row, start : lengths[row]]
    logits, cache = kj.prefill(model, rest, lengths - first, cache)
    longer = lengths > first
    assert_logits(np.asarray(logits)[longer], want[longer])
    sequence = golden(name)["seq_input_ids"]
    plain = np.flatnonzero((tokens[:, 0] == sequence[0]) & (lengths < len(sequence)))
    logits, _ = kj.decode(model, sequence[np.minimum(lengths, len(sequence) - 1)], cache)
    assert_logits(np.asarray(logits)[plain], golden(name)["seq_logits"][lengths[plain]])


@ON_ONE_DEVICE
@pytest.mark.usefixtures("optimized_on_one_device")
def test_decode_from_the_first_token(name, mesh, tiny, golden):
    model, data = tiny(name, mesh), golden(name)
    cache = kj.init_cache(model, 8, 192)
    count = len(data["seq_input_ids"]) if mesh == "one" else 24
    found = []
    for token in data["seq_input_ids"][:count]:
        logits, cache = kj.decode(model, [token] * 8, cache)
        found.append(np.asarray(logits))
    assert_logits(np.stack(found), np.tile(data["seq_logits"][:count, None], (1, 8, 1)))


@pytest.mark.parametrize(("name", "mesh"), grouped(("tiny-kimi-linear",), ("one",)))
def test_pieces_of_their_own_shapes(name, mesh, tiny, golden):
    model, data = tiny(name, mesh), golden(name)
    cache, done = kj.init_cache(model, 8, 192), 0
    for size in (1, 3, 17, 64, *((65,) if len(data["seq_input_ids"]) == WIDTH else (35,))):
        piece = data["seq_input_ids"][done : done + size]
        logits, cache = kj.prefill(model, np.tile(piece, (8, 1)), [size] * 8, cache)
        done += size
        assert_logits(logits, np.tile(data["seq_logits"][done - 1], (8, 1)))
    assert done == len(data["seq_input_ids"])


def in_expert_order(index, weight):
    order = np.argsort(index, axis=-1)
    return np.take_along_axis(index, order, -1), np.take_along_axis(weight, order, -1)


@ON_ONE_DEVICE
def test_trace_shows_what_the_published_code_computes(name, mesh, tiny, golden):
    data = golden(name)
    trace = kj.trace(tiny(name, mesh), data["seq_input_ids"][None])
    np.testing.assert_allclose(np.stack(trace.hidden)[:, 0], data["seq_layer_out"], atol=1e-3, rtol=0)
    if name == "tiny-k31":
        return
    for field in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
        np.testing.assert_allclose(np.stack(getattr(trace, field))[:, 0], data[f"seq_{field}"], atol=1e-3, rtol=0)
    np.testing.assert_allclose(trace.final_hidden[0], data["seq_final_norm_in"], atol=1e-3, rtol=0)

    layer = int(data["kda_layer"])
    state = np.swapaxes(data["kda_recurrent_state_vk"], -1, -2)
    np.testing.assert_allclose(trace.kda_state[layer][0], state, atol=2e-4, rtol=0)
    tails = [data[f"kda_conv_state_{part}"][:, -3:].T for part in "qkv"]
    np.testing.assert_allclose(trace.conv_state[layer][0], np.concatenate(tails, axis=-1), atol=1e-3, rtol=0)

    for n, layer in enumerate(data["router_layers"]):
        index, weight = (np.asarray(x[layer][0]) for x in (trace.router_index, trace.router_weight))
        index, weight = in_expert_order(index, weight)
        np.testing.assert_array_equal(index, data["router_topk_index"][n])
        np.testing.assert_allclose(weight, data["router_topk_weight"][n], atol=5e-5, rtol=0)
    kinds = tiny(name).config.layer_kinds
    assert [state is None for state in trace.kda_state] == [kind == "mla" for kind in kinds]
    assert [i for i, index in enumerate(trace.router_index) if index is not None] == data["router_layers"].tolist()


@pytest.mark.xdist_group("tiny-k31 one")
def test_a_loop_traces_each_layer(tiny, golden):
    """Two rounds of a KDA and an MLA layer with an indexer."""
    looped = kj.trace(tiny("tiny-k31", loop=True), golden("tiny-k31")["seq_input_ids"][None])
    np.testing.assert_allclose(np.stack(looped.hidden)[:, 0], golden("tiny-k31")["seq_layer_out"], atol=1e-3, rtol=0)
    kinds = tiny("tiny-k31").config.layer_kinds
    assert [state is None for state in looped.kda_state] == [kind == "mla" for kind in kinds]


@pytest.mark.xdist_group("tiny-k31 one")
def test_choices_reach_their_layers_in_a_loop(tiny):
    model = tiny("tiny-k31", loop=True)
    layers, shape = range(1, 6), (1, 16, model.config.moe.experts_per_token)
    choice = {layer: jnp.broadcast_to((jnp.arange(shape[-1]) + layer) % 8, shape) for layer in layers}

    def run(params, choice):
        with computing(model.spec):
            tokens, lengths = jnp.arange(16)[None], jnp.asarray([16])
            return model.spec.module(params)(tokens, lengths, choice=choice, observe=lambda trace: trace).observed

    traces = jax.jit(run)(model.params, choice)
    assert traces[0].router_index is None
    for layer in layers:
        np.testing.assert_array_equal(traces[layer].router_index, choice[layer])
    with pytest.raises(ValueError, match=r"layers 1, 3, … run as a loop: 3 lacks"):
        jax.eval_shape(run, model.params, {1: choice[1]})


@ON_ONE_DEVICE
def test_sublayers_in_bfloat16(name, mesh, tiny, golden):
    """Each part alone, with the golden input and the golden choice of experts."""
    if name == "tiny-k31":
        pytest.skip("its golden data has no sublayer inputs")
    model, data = tiny(name, mesh, "bfloat16"), golden(name)
    choices = {int(layer): data["router_topk_index"][n][None] for n, layer in enumerate(data["router_layers"])}
    bf16 = jnp.bfloat16

    @jax.jit
    def run(params, attn_in, mlp_in):
        attention, mlp = [], []
        with computing(model.spec):
            call = make_call(attn_in.shape[2], jnp.asarray([attn_in.shape[2]]), None)
            for i, layer in enumerate(model.spec.module(params).layers):
                attention.append(layer.self_attn(attn_in[i], call, None)[0])
                if i in choices:
                    mlp.append(layer.block_sparse_moe(mlp_in[i], call, jnp.asarray(choices[i]))[0])
                else:
                    mlp.append(layer.mlp(mlp_in[i]))
        return attention, mlp

    inputs = (jnp.asarray(data[key][:, None], bf16) for key in ("seq_attn_in", "seq_mlp_in"))
    attention, mlp = run(model.params, *inputs)
    for got, want in ((attention, data["seq_attn_out"]), (mlp, data["seq_mlp_out"])):
        for i, out in enumerate(got):
            assert out.dtype == bf16
            assert relative_rms(np.asarray(out[0], np.float32), want[i]) <= 0.02, f"layer {i}"


@pytest.mark.xdist_group("float64")
def test_float64_agrees_more_closely_than_float32_could(golden, tiny):
    data = golden("tiny-kimi-linear")
    with jax.enable_x64(True):
        directory = tiny.directory("tiny-kimi-linear")
        logits = kj.forward(kj.load_model(directory, dtype="float64"), data["seq_input_ids"][None])
        assert logits.dtype == jnp.float64
        assert relative_rms(np.asarray(logits[0]), data["seq_logits"]) <= 2.5e-6  # the oracle's own float32 error
        looped = kj.load_model(directory, dtype="float64", loop=True)
        tokens = data["seq_input_ids"][None]
        last, _ = kj.prefill(looped, tokens, [tokens.shape[1]], kj.init_cache(looped, 1, tokens.shape[1]))
        assert relative_rms(np.asarray(last[0]), data["seq_logits"][-1]) <= 2.5e-6
