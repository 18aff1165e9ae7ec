"""Runs: stopped and gone on with, nothing of the base changed, bad directories refused."""

import dataclasses
import hashlib
import json

import jax
import numpy as np
import pytest
from finetune.conftest import TinyRun

from kimi_jax.finetune.data.errors import DataError
from kimi_jax.finetune.run import run_finetuning
from kimi_jax.finetune.run_directory import RunError, cut_metrics
from kimi_jax.model.adapters import fetch_adapters
from kimi_jax.model.model import flatten

pytestmark = pytest.mark.usefixtures("optax_promotion")


def digest(params):
    whole = hashlib.sha256()
    for name, array in sorted(flatten(params)):
        whole.update(name.encode() + np.asarray(array).tobytes())
    return whole.hexdigest()


def test_a_run_goes_on_where_it_was_stopped(tmp_path, tiny_run: TinyRun):
    config, held_out = tiny_run.config, tiny_run.held_out
    whole = tiny_run.trainer()
    before = digest(whole.base)
    lines = []
    run_finetuning(whole, config, tiny_run.batches(), held_out, tmp_path / "a", origin={}, report=lines.append)
    assert digest(whole.base) == before
    adapters = fetch_adapters(whole.spec, whole.state.adapters)
    assert any(np.abs(x).max() > 0 for name, x in adapters.items() if name.endswith("lora_B"))

    class KilledError(Exception):
        pass

    def kill(line):
        if line.get("step") == 5 and "loss" in line:
            raise KilledError

    killed = tiny_run.trainer()
    with pytest.raises(KilledError):
        run_finetuning(killed, config, tiny_run.batches(), held_out, tmp_path / "b", origin={}, report=kill)
    again = tiny_run.trainer()
    run_finetuning(again, config, tiny_run.batches(), held_out, tmp_path / "b", origin={})
    for name, x in fetch_adapters(again.spec, again.state.adapters).items():
        np.testing.assert_allclose(x, adapters[name], rtol=0, atol=1e-6, err_msg=name)
    logs = [[json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()] for run in "ab"]
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]] == [1, 2, 3, 4, 4, 5, 6, 7, 7]
    for one, other in zip(*logs, strict=True):
        for name in {"loss", "held_out_loss", "router_drift"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-5)
    assert lines[-1]["held_out_loss"] < lines[4]["held_out_loss"]
    assert lines[0]["router_drift"] == 0  # B is zero: the router chooses as the base does
    assert (tmp_path / "a" / "adapters" / "adapter_config.json").is_file()


def test_directories_that_are_refused(tmp_path, tiny_run: TinyRun):
    trainer = tiny_run.trainer()

    def run(directory, config=tiny_run.config, origin=None):
        run_finetuning(trainer, config, tiny_run.batches(), None, directory, origin=origin or {"model": "x"})

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").write_text("kept")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        run(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["precious.txt"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(
        json.dumps({"origin": {"model": "x"}, "settings": json.loads(json.dumps(dataclasses.asdict(tiny_run.config)))})
    )
    (tmp_path / "run" / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(RunError, match=r"started with origin\.model 'x', now it is 'y'"):
        run(tmp_path / "run", origin={"model": "y"})
    longer = dataclasses.replace(tiny_run.config, run=dataclasses.replace(tiny_run.config.run, seed=9))
    with pytest.raises(RunError, match=r"started with settings\.run\.seed 0, now it is 9"):
        run(tmp_path / "run", longer)


def test_a_damaged_save_and_a_diverged_step_are_told(tmp_path, tiny_run: TinyRun):
    """Of a save only the state is gone. Adapters of NaN give a loss of NaN, and nothing is saved."""
    config, trainer = tiny_run.config, tiny_run.trainer()
    (tmp_path / "damaged" / "checkpoints" / "4" / "data").mkdir(parents=True)
    (tmp_path / "damaged" / "run.json").write_text(
        json.dumps({"origin": {}, "settings": json.loads(json.dumps(dataclasses.asdict(config)))})
    )
    (tmp_path / "damaged" / "metrics.jsonl").write_text('{"step": 4}\ngarbage}\n')
    with pytest.raises(RunError, match=r"checkpoints/4: cannot be read: .*; delete this folder to go on from the"):
        run_finetuning(trainer, config, tiny_run.batches(), None, tmp_path / "damaged", origin={})
    adapters = jax.tree.map(lambda x: x * np.float32("nan"), trainer.state.adapters)
    trainer.state = dataclasses.replace(trainer.state, adapters=adapters)
    with pytest.raises(RunError, match=r"step 1: loss is nan; nothing behind the last save is kept"):
        run_finetuning(trainer, config, tiny_run.batches(), None, tmp_path / "run", origin={})
    assert not any(path.name.isdecimal() for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert not (tmp_path / "run" / "adapters").exists()


def test_damaged_lines_of_metrics_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2}\ngarbage}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    cut_metrics(path, 2)
    assert path.read_text() == '{"step": 1, "loss": 2}\n{"step": 2}\n'


def test_the_optimizer_holds_nothing_of_the_base(tiny_run: TinyRun):
    state = tiny_run.trainer().state
    adapters = sum(x.size for x in jax.tree.leaves(state.adapters))
    means = [x for x in jax.tree.leaves(state.optimizer) if x.size > 1]
    assert sum(x.size for x in means) == 2 * adapters
    assert {x.dtype for x in means} == {np.dtype("float32")}


def test_data_of_other_settings_is_no_place_to_go_on(tiny_run: TinyRun):
    batches = tiny_run.batches()
    state = batches.state() | {"settings": {}}
    with pytest.raises(DataError, match="the saved position is one of"):
        batches.restore(state)
