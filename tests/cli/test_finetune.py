"""`kimi-jax finetune` as its user runs it, on a synthetic model of two layers, and `kimi-jax merge` behind it."""

import json

import pytest

from kimi_jax.checkpoint.synthesize import synthesize
from kimi_jax.cli.bundled import BUNDLED

SETTINGS = """
[run]
steps = 4
save_every = 2
drift_every = 0
[lora]
rank = 2
targets = ["q_proj", "experts"]
[optimizer]
learning_rate = 1e-2
warmup_steps = 0
[data]
rows = 2
length = 16
"""


@pytest.fixture
def files(vocabulary):
    """A directory with `model`, `train.jsonl` and `settings.toml`."""
    config = json.loads((BUNDLED / "config.json").read_text())
    text = config["text_config"]
    text["num_hidden_layers"] = 2
    text["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2]}
    (vocabulary / "config.json").write_text(json.dumps(config))
    synthesize(vocabulary / "config.json", vocabulary / "model")
    (vocabulary / "tiktoken.model").rename(vocabulary / "model" / "tiktoken.model")
    lines = ['{"text": "in the beginning"}', "not JSON", '{"text": "and the earth was without form"}']
    (vocabulary / "train.jsonl").write_text("\n".join(lines))
    (vocabulary / "settings.toml").write_text(SETTINGS)
    return vocabulary


@pytest.mark.usefixtures("optax_promotion")
def test_train_and_merge(run, files):
    model, out, data = files / "model", files / "run", files / "train.jsonl"
    options = ("--data", data, "--config", files / "settings.toml", "--out", out, "--dtype", "float32")
    code, printed, error = run("finetune", model, *options, "--steps", "3")
    assert code == 0, error
    assert printed.splitlines()[-1] == f"{out / 'adapters'}: adapters of step 3"
    assert f"{data}: line 2: not JSON" in error
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    wanted = {"loss", "gradient_norm", "tokens_per_second", "router_max_load", "router_entropy"}
    assert wanted <= metrics[0].keys()
    adapter = json.loads((out / "adapters" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (2, 32)

    code, _, error = run("finetune", model, *options, "--steps", "4")
    assert code == 1
    assert "started with settings.run.steps 3, now it is 4" in error

    code, _, error = run("merge", model, out, files / "merged")
    assert code == 1
    assert "ask for it with --experts" in error
    assert not (files / "merged").exists()
    code, printed, error = run("merge", model, out, files / "merged", "--experts", "--force")
    assert code == 0, error
    # q_proj of the KDA layer, three stacks of experts
    assert printed.splitlines()[-1] == f"{files / 'merged'}: 4 modules changed"


def test_wrong_use(run, files):
    data, settings = ("--data", files / "train.jsonl"), files / "settings.toml"
    code, _, error = run("finetune", files / "model", "--data", files / "none.jsonl", "--out", files / "run")
    assert code == 1
    assert "none.jsonl" in error
    code, _, error = run("finetune", files / "model", *data, "--out", files / "run", "--adapters", files / "none")
    assert code == 1
    assert f"{files / 'none'}" in error
    settings.write_text('[lora]\ntargets = ["gate"]')
    code, _, error = run("finetune", files / "model", *data, "--out", files / "run", "--config", settings)
    assert code == 2
    assert f"{settings}: lora: target 'gate' fits no module" in error
    assert not (files / "run").exists()
