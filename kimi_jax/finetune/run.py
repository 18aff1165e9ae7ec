"""A run of fine-tuning in a directory of its own, which can be stopped at any step and gone on with.

RUN/run.json         what it was started with
RUN/metrics.jsonl    a line a step, and a line an evaluation
RUN/checkpoints/     adapters, optimizer and position in the data, by step (Orbax)
RUN/adapters/        the adapters of the last save in PEFT's format
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from kimi_jax.checkpoint.adapters import write_adapters
from kimi_jax.finetune.data.batches import Batch, Batches
from kimi_jax.finetune.run_directory import RunError, cut_metrics, open_run
from kimi_jax.finetune.settings import FinetuneConfig
from kimi_jax.finetune.trainer import Trainer
from kimi_jax.model.adapters import fetch_adapters

Metrics = Mapping[str, Any]
Report = Callable[[Metrics], None]


def open_finetuning(directory: str | Path, config: FinetuneConfig, origin: Mapping[str, Any]) -> None:
    """Makes the directory of a run, or finds that its run is this one; see `open_run`.

    `origin`: what else the run depends on (model, files), as JSON has it.
    """
    saves = Path(directory) / "checkpoints"
    saved = saves.is_dir() and any(path.name.isdecimal() for path in saves.iterdir())
    open_run(directory, {"origin": dict(origin), "settings": asdict(config)}, saved)


def run_finetuning(
    trainer: Trainer,
    config: FinetuneConfig,
    batches: Batches,
    held_out: Callable[[], Iterator[Batch]] | None,
    directory: str | Path,
    *,
    origin: Mapping[str, Any],
    report: Report = lambda _: None,
) -> None:
    """Trains to the last step, from the last save on where there is one.

    **Arguments:**

    - `batches`: standing before the first batch; this process's share of each.
    - `held_out`: gives the batches of an evaluation; None for no evaluation.
    - `directory`: of the run; made where it is not there.
    - `origin`: what else the run depends on (model, files), as JSON has it: a run goes on only where it is the same.
    - `report`: is called with each line of the metrics.

    **Raises:** `RunError` for a directory of another run, or that is no run's, for a damaged save, and, before anything
    of it is saved, for a loss or gradient that is no finite number.
    """
    config.optimizer.check_steps(config.run.steps)
    directory = Path(directory).absolute()
    steps = config.run.steps
    open_finetuning(directory, config, origin)
    base_model = origin.get("model")
    options = ocp.CheckpointManagerOptions(max_to_keep=config.run.keep, create=True)
    with ocp.CheckpointManager(directory / "checkpoints", options=options) as saves:
        done = _restore(saves, trainer, batches)
        log = _Log(directory / "metrics.jsonl", done, report)
        if done:
            log.remark(f"going on behind step {done}")
            _write_adapters(trainer, directory / "adapters", base_model)
        waiting: tuple[int, dict[str, Any]] | None = None

        def save(step: int) -> None:
            _save(saves, step, trainer, batches)
            _write_adapters(trainer, directory / "adapters", base_model)
            log.restart()

        for step in range(done + 1, steps + 1):
            batch = next(batches, None)
            if batch is None:
                if waiting is not None:
                    log.step(*waiting)
                    save(step - 1)
                raise RunError(f"the data ends at step {step - 1} of {steps}, which is saved; ask for fewer steps")
            drift = config.run.drift_every > 0 and step % config.run.drift_every == 0
            found = trainer.step(batch, drift)
            # The line of a step is written while the next one runs.
            if waiting is not None:
                log.step(*waiting)
            waiting, last = (step, found), step == steps
            evaluates = held_out is not None and config.run.evaluate_every > 0
            evaluates = evaluates and _is_due(step, config.run.evaluate_every, last)
            saves_now = _is_due(step, config.run.save_every, last)
            if evaluates or saves_now:
                log.step(*waiting)
                waiting = None
            if evaluates and held_out is not None:  # before the save: a run goes on behind both
                log.evaluation(step, trainer.evaluate(held_out()))
            if saves_now:
                save(step)
        saves.wait_until_finished()


def _is_due(step: int, every: int, last: bool) -> bool:
    return last or step % every == 0


def _restore(saves: ocp.CheckpointManager, trainer: Trainer, batches: Batches) -> int:
    """The steps that the newest save holds, put into trainer and data; 0 without one."""
    step = saves.latest_step()
    if step is None:
        return 0
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.state)
    try:
        saved = saves.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like), data=ocp.args.JsonRestore())
        )
        state, position = saved["state"], dict(saved["data"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        path, kept = saves.directory / str(step), [other for other in saves.all_steps() if other < step]
        back = f"from step {max(kept)}" if kept else "from the beginning"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"{path}: cannot be read: {reason}; delete this folder to go on {back}") from None
    trainer.state = state
    batches.restore(position)
    return step


def _save(saves: ocp.CheckpointManager, step: int, trainer: Trainer, batches: Batches) -> None:
    args = ocp.args.Composite(state=ocp.args.StandardSave(trainer.state), data=ocp.args.JsonSave(batches.state()))
    if step not in saves.all_steps():
        saves.save(step, args=args, force=True)
        saves.wait_until_finished()  # an error of the background thread ends the run here


def _write_adapters(trainer: Trainer, directory: Path, base_model: str | None) -> None:
    assert trainer.spec.adapters is not None
    arrays = fetch_adapters(trainer.spec, trainer.state.adapters)
    if jax.process_index() == 0:
        write_adapters(directory, trainer.spec.config, trainer.spec.adapters, arrays, base_model=base_model)


class _Log:
    """The metrics file, cut back to the step that the run goes on from."""

    def __init__(self, path: Path, done: int, report: Report) -> None:
        self.path, self.report, self.writes = path, report, jax.process_index() == 0
        self.time = time.perf_counter()
        if self.writes:
            cut_metrics(path, done)

    def remark(self, text: str) -> None:
        """Says something that is no metric."""
        self.report({"remark": text})

    def step(self, step: int, found: Mapping[str, Any]) -> None:
        """Waits for a step's numbers and writes them."""
        numbers = {name: float(np.asarray(value)) for name, value in found.items()}
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(numbers[name]):
                raise RunError(
                    f"step {step}: {name} is {numbers[name]}; nothing behind the last save is kept: begin a run with a "
                    "lower learning_rate, or clip_norm"
                )
        now = time.perf_counter()
        seconds, self.time = now - self.time, now
        self._write({"step": step, **numbers, "tokens_per_second": numbers["tokens"] / seconds, "seconds": seconds})

    def evaluation(self, step: int, loss: float) -> None:
        """Writes the loss of the held-out data."""
        self._write({"step": step, "held_out_loss": loss})
        self.restart()

    def restart(self) -> None:
        """What took time until now was no step."""
        self.time = time.perf_counter()

    def _write(self, line: Metrics) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.report(line)
