"""Training of a whole model on a text of two letters: a KDA and an MLA layer, four experts, 512 ids."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.checkpoint.write import write_checkpoint
from kimi_jax.config import ConfigError, read_json_object, shipped_directory
from kimi_jax.finetune.balance import expert_load, load_report, moved_bias
from kimi_jax.finetune.pretrain import Trainer, bits_per_byte
from kimi_jax.finetune.recipe import Recipe
from kimi_jax.finetune.windows import Text, evaluation_rows, read_text, training_rows
from kimi_jax.model.model import nest

STEPS = 12


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    folder = tmp_path_factory.mktemp("pretrain")
    config = read_json_object(shipped_directory() / "tiny-k3.json")
    text = config["text_config"]
    text |= {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_experts": 4}
    text |= {"num_experts_per_token": 2, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32}
    text["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "tiktoken.model").write_text("".join(tokens))
    (folder / "train.txt").write_text("ab" * 400 + "\n\n" + "ba" * 100)
    (folder / "heldout.txt").write_text("ab" * 20)
    return Recipe(
        model=str(folder / "config.json"),
        text=(str(folder / "train.txt"),),
        held_out=(str(folder / "heldout.txt"),),
        tokenizer=str(folder),
        sequence=16,
        batch=4,
        steps=STEPS,
        warmup=2,
        learning_rate=0.02,
        bias_rate=0.01,
        log_every=1,
        evaluate_every=STEPS,
        save_every=5,
    )


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    trainer = Trainer(recipe, tmp_path_factory.mktemp("run"))
    return trainer, trainer.run()


def metrics(trainer: Trainer) -> list[dict]:
    return [json.loads(line) for line in (trainer.out / "metrics.jsonl").read_text().splitlines()]


def test_loss_falls_on_two_letters(trained):
    trainer, state = trained
    lines = metrics(trainer)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert abs(lines[0]["loss"] - np.log(512)) < 1
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert lines[-1]["held_out_bits_per_byte"] < 5
    for name, bias in state.biases.items():
        moved = np.asarray(bias) / trainer.recipe.bias_rate
        assert np.abs(moved).max() >= 1, name
        np.testing.assert_allclose(moved, np.round(moved), atol=1e-4)  # whole steps: the optimizer left it alone


def test_resumed_run_equals_uninterrupted(trained, recipe, tmp_path):
    whole, state = trained

    def stop(line: dict) -> None:
        if line["step"] == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(recipe, tmp_path).run(stop)
    resumed = Trainer(recipe, tmp_path)
    again = resumed.run()
    for name, value in (state.params | state.biases).items():
        np.testing.assert_array_equal((again.params | again.biases)[name], value, err_msg=name)

    def timeless(trainer: Trainer) -> list[dict]:
        return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in metrics(trainer)]

    assert timeless(resumed) == timeless(whole)


def test_written_checkpoint_gives_the_trained_logits(trained):
    trainer, state = trained
    model = kj.load_model(trainer.out / "checkpoint", dtype="float32")
    assert model.config == trainer.spec.config
    tokens = np.frombuffer(b"abbaabab", np.uint8).astype(np.int32)[None]

    @jax.jit
    def logits(params):
        module = trainer.spec.module(params)
        return module.logits(module(tokens, jnp.array([8], jnp.int32)).final_hidden)

    wanted = logits(nest(state.params | state.biases))
    np.testing.assert_allclose(kj.forward(model, tokens), wanted, rtol=1e-5, atol=1e-5)
    bits = bits_per_byte(model.spec, model.params, trainer.held_out, 16, 4)
    assert round(bits, 4) == round(metrics(trainer)[-1]["held_out_bits_per_byte"], 4)


def test_bias_moves_against_the_load():
    load = expert_load(jnp.array([[[0, 2], [0, 3], [0, 2], [0, 3]]]), 4)
    np.testing.assert_array_equal(load, [4, 0, 2, 2])
    moved = moved_bias(jnp.array([0.0, 0.0, 0.25, -0.25]), load, 0.5)
    np.testing.assert_array_equal(moved, [-0.5, 0.5, 0.25, -0.25])
    report = load_report({"one": load, "even": jnp.array([2.0, 2, 2, 2])})
    assert float(report["load_max_over_mean"]) == 2
    assert int(report["experts_unused"]) == 1
    # Shares 1/2, 1/4, 1/4: 1.5 bits of the 2 that even ones have.
    np.testing.assert_allclose(report["load_entropy"], (0.75 + 1) / 2, rtol=1e-6)


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
    targets = np.concatenate([part[:, 1:][counted] for part, counted in rows])
    np.testing.assert_array_equal(targets, ids[1:])
    assert {part.shape for part, _ in rows} == {(3, 5)}


def test_documents_end_at_empty_lines(trained, tmp_path):
    trainer, _ = trained
    path = tmp_path / "text.txt"
    path.write_text("ab\n\nc\n")
    text = read_text([path, path], trainer.tokenizer)
    end = trainer.tokenizer.eos_id
    assert isinstance(text, Text)
    assert text.ids.tolist() == [97, 98, 10, end, 99, 10, end] * 2
    assert text.size == 12


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("steps = 0", "'steps': 0 must be at least 1"),
        ("steps = 2.5", "'steps': 2.5 must be a whole number"),
        ("optimiser = 1", "'optimiser' is unknown"),
        ('optimizer = "sgd"', "'sgd' is none of adamw, muon"),
        ("text = 3", "'text': 3 must be a list of strings"),
        ("warmup = 9000", "'warmup': 9000 must lie between 0 and"),
    ],
)
def test_faults_of_a_recipe_are_named(line, message, tmp_path):
    shipped = Path(shipped_directory()).parent / "finetune" / "pretrain-tiny.toml"
    name = line.split()[0]
    kept = [old for old in shipped.read_text().splitlines() if old.split(" ")[0] != name]
    (tmp_path / "recipe.toml").write_text("\n".join([*kept, line]))
    with pytest.raises(ConfigError, match=message):
        Recipe.from_file(tmp_path / "recipe.toml")


def test_writing_names_the_parameter_at_fault(trained, tmp_path):
    trainer, state = trained
    config = read_json_object(trainer.out / "checkpoint" / "config.json")
    params = {name: np.asarray(value) for name, value in (state.params | state.biases).items()}
    name = "layers.1.self_attn.o_proj.weight"
    for fault, message in (
        ({name: params[name][:1]}, r"o_proj.weight has the shape \(1, 64\), the file wants"),
        ({name: params[name].astype(np.float64)}, "o_proj.weight is float64, wanted one of BF16, F32"),
        ({"layers.9.norm.weight": params[name]}, "layers.9.norm.weight is none of"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write_checkpoint(tmp_path, config, params | fault, {})
    del params[name]
    with pytest.raises(CheckpointError, match="o_proj.weight is missing"):
        write_checkpoint(tmp_path, config, params, {})
    assert replace(trainer.recipe, steps=STEPS) == trainer.recipe
