"""Training of a whole model on a text of two letters: one MLA layer, four experts, 512 ids."""

import base64
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.config import ConfigError, read_json_object, shipped_directory
from kimi_jax.finetune.balance import moved_bias
from kimi_jax.finetune.optimizer import OptimizerConfig, make_optimizer
from kimi_jax.finetune.pretrain import ModelFiles, PretrainConfig, Pretraining, PretrainRun, TextConfig, bits_per_byte
from kimi_jax.finetune.router_statistics import expert_counts
from kimi_jax.finetune.run_directory import RunError
from kimi_jax.finetune.settings import read_settings
from kimi_jax.finetune.windows import evaluation_rows, read_text, training_rows
from kimi_jax.model.model import flatten

STEPS = 12


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> PretrainConfig:
    folder = tmp_path_factory.mktemp("pretrain")
    raw = read_json_object(shipped_directory() / "tiny-k3.json")
    text = raw["text_config"]
    text |= {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_experts": 4,
        "attn_res_block_size": None,
    }
    text |= {"num_experts_per_token": 2, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32}
    text["linear_attn_config"] |= {"kda_layers": [], "full_attn_layers": [1]}
    (folder / "config.json").write_text(json.dumps(raw))
    tokens = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "tiktoken.model").write_text("".join(tokens))
    (folder / "train.txt").write_text("ab" * 400 + "\n\n" + "ba" * 100)
    (folder / "heldout.txt").write_text("ab" * 20)
    return PretrainConfig(
        ModelFiles(str(folder / "config.json"), str(folder)),
        TextConfig((str(folder / "train.txt"),), (str(folder / "heldout.txt"),), rows=4, length=16),
        PretrainRun(STEPS, bias_rate=0.01, log_every=1, evaluate_every=STEPS, save_every=5),
        OptimizerConfig(learning_rate=0.03, warmup_steps=2),
    )


def run(pretraining: Pretraining, **options):
    """optax mixes dtypes and ranks, and so do its updates."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return pretraining.run(**options)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    pretraining = Pretraining(config, tmp_path_factory.mktemp("run"))
    return pretraining, run(pretraining)


def metrics(pretraining: Pretraining) -> list[dict]:
    return [json.loads(line) for line in (pretraining.out / "metrics.jsonl").read_text().splitlines()]


def test_loss_falls_on_two_letters(trained):
    pretraining, state = trained
    lines = metrics(pretraining)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert abs(lines[0]["loss"] - np.log(512)) < 1
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert lines[-1]["held_out_bits_per_byte"] < 5
    for name, bias in state.biases.items():
        moved = np.asarray(bias) / pretraining.config.run.bias_rate
        assert np.abs(moved).max() >= 1, name
        np.testing.assert_allclose(moved, np.round(moved), atol=1e-4)  # whole steps: the optimizer left it alone


def test_resumed_run_equals_uninterrupted(trained, config, tmp_path):
    whole, state = trained

    def stop(line: dict) -> None:
        if line["step"] == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Pretraining(config, tmp_path), report=stop)
    resumed = Pretraining(config, tmp_path)
    again = run(resumed)
    for name, value in (state.params | state.biases).items():
        np.testing.assert_array_equal((again.params | again.biases)[name], value, err_msg=name)

    def timeless(pretraining: Pretraining) -> list[dict]:
        return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in metrics(pretraining)]

    assert timeless(resumed) == timeless(whole)


@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[: len(whole) // 2]])
def test_a_damaged_save_is_named(trained, tmp_path, damage):
    out = shutil.copytree(trained[0].out, tmp_path / "run")
    save = out / "state.npz"
    save.write_bytes(damage(save.read_bytes()))
    with pytest.raises(RunError, match=r"state\.npz: cannot be used: .*; delete it to start again"):
        run(Pretraining(trained[0].config, out))


def test_written_checkpoint_is_the_trained_model(trained):
    pretraining, state = trained
    model = kj.load_model(pretraining.out / "checkpoint", dtype="float32")
    assert model.spec == pretraining.spec
    loaded, wanted = dict(flatten(model.params)), state.params | state.biases
    assert loaded.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)
    bits = bits_per_byte(model.spec, model.params, pretraining.held_out, 16, 4)
    assert round(bits, 6) == metrics(pretraining)[-1]["held_out_bits_per_byte"]


@pytest.mark.parametrize("experts", ["float32", "bfloat16"])
def test_weights_are_written_as_asked(trained, tmp_path, experts):
    """The norms and projections as published, the router's bias in float32 always."""
    pretraining, state = trained
    asked = replace(pretraining.config.run, dense_dtype="bfloat16", expert_dtype=experts)
    written = Pretraining(replace(pretraining.config, run=asked), tmp_path).write(state)
    params = dict(flatten(kj.load_model(written).params))
    kept = {name.split(".", 2)[-1] for name, value in params.items() if value.dtype == np.float32}
    wide = {f"block_sparse_moe.experts.{name}.weight" for name in ("w1", "w2", "w3")}
    assert kept == {"block_sparse_moe.gate.e_score_correction_bias"} | (wide if experts == "float32" else set())
    np.testing.assert_array_equal(params["norm.weight"], state.params["norm.weight"].astype(jnp.bfloat16))


def test_muon_takes_the_matrices_and_adamw_the_rest(optax_promotion):
    params = {name: jnp.ones((4, 6)) for name in ("matrix", "embedding")}
    config = OptimizerConfig("muon", learning_rate=0.1, warmup_steps=0, weight_decay=0.5, clip_norm=0)
    optimizer = make_optimizer(config, 10, {"matrix": True, "embedding": False})
    gradient = jnp.diag(jnp.array([1.0, 2, 3, 4, 0, 0]))[:4]
    update, _ = jax.jit(optimizer.update)(dict.fromkeys(params, gradient), optimizer.init(params), params)
    # adamw's first step with Nesterov's momentum: the sign times 1 + 0.9 · 0.1 / (1 − 0.9²). No decay.
    np.testing.assert_allclose(update["embedding"], -0.1 * (1 + 0.09 / 0.19) * (gradient > 0), atol=1e-6)
    # Muon makes all singular values about 1 (0.7 to 1.2), times 0.2 √6; then comes the decay.
    turned = np.asarray(-update["matrix"] / 0.1 - 0.5 * params["matrix"]) / (0.2 * 6**0.5)
    assert np.all(np.abs(np.diag(turned) - 0.95) < 0.27)
    np.testing.assert_allclose(turned[:, :4] - np.diag(np.diag(turned)), 0, atol=1e-5)


def test_bias_moves_against_the_load():
    index = jnp.array([[[0, 2], [0, 3], [0, 2], [0, 3]]])
    load = expert_counts(index, jnp.ones((1, 4), bool), 4)
    np.testing.assert_array_equal(load, [4, 0, 2, 2])
    moved = moved_bias(jnp.array([0.0, 0.0, 0.25, -0.25]), load, 0.5)
    np.testing.assert_array_equal(moved, [-0.5, 0.5, 0.25, -0.25])


def test_rows_of_a_round_hold_every_token_once():
    ids = np.arange(103, dtype=np.int32)
    seen = np.concatenate([training_rows(ids, 10, 5, seed=3, step=step) for step in range(2)])[:9]
    assert seen.shape == (9, 11)
    first = seen.min()
    assert sorted(seen[:, :-1].ravel()) == list(range(first, first + 90))
    np.testing.assert_array_equal(seen[:, 1:], seen[:, :-1] + 1)
    assert not np.array_equal(seen[:5], training_rows(ids, 10, 5, seed=4, step=0))


def test_evaluation_counts_every_token_but_the_first_once():
    ids = np.arange(100, 126, dtype=np.int32)
    rows = list(evaluation_rows(ids, 4, 3))
    targets = np.concatenate([part[:, 1:][weight == 1] for part, weight in rows])
    np.testing.assert_array_equal(targets, ids[1:])
    assert {part.shape for part, _ in rows} == {(3, 5)}


def test_documents_end_at_empty_lines(trained, tmp_path):
    pretraining, _ = trained
    path = tmp_path / "text.txt"
    path.write_text("ab\n\nc\n")
    text = read_text([path, path], pretraining.tokenizer)
    end = pretraining.tokenizer.eos_id
    assert text.ids.tolist() == [97, 98, 10, end, 99, 10, end] * 2
    assert text.size == 12


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = ", "steps = 0 # ", "run: steps 0 must be at least 1"),
        ("rows = 8", "rows = 0", "text: rows 0 must be at least 1"),
        ("length = 256", "length = 2.5", "length: found 2.5, wanted int"),
    ],
)
def test_faults_of_the_settings_are_named(old, new, message, tmp_path):
    shipped = shipped_directory().parent / "finetune" / "pretrain-tiny.toml"
    text = shipped.read_text()
    assert read_settings(shipped, PretrainConfig).run.bias_rate == 0.01
    (tmp_path / "settings.toml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_settings(tmp_path / "settings.toml", PretrainConfig)
