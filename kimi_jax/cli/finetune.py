"""`kimi-jax finetune`: train adapters of a checkpoint on lines of text or conversations."""

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.checkpoint.adapters import adapter_folder
from kimi_jax.cli.bundled import find_checkpoint
from kimi_jax.cli.job import JobFlags, job_mesh, mesh_shape
from kimi_jax.cli.model_flags import ModelFlags
from kimi_jax.cli.output import UsageError, emit, remark
from kimi_jax.cli.run_progress import run_progress
from kimi_jax.config import ModelConfig
from kimi_jax.finetune.data.batches import Batches
from kimi_jax.finetune.data.documents import Documents
from kimi_jax.finetune.data.errors import DataError
from kimi_jax.finetune.data.lines import Lines
from kimi_jax.finetune.optimizer import make_optimizer
from kimi_jax.finetune.run import open_finetuning, run_finetuning
from kimi_jax.finetune.settings import FinetuneConfig, read_settings
from kimi_jax.finetune.targets import adapter_spec
from kimi_jax.finetune.trainer import Trainer, process_rows


@dataclass(frozen=True)
class Finetune(ModelFlags):
    """Train low-rank adapters of a checkpoint; its own weights, packed experts among them, are never changed.

    Stopped at any moment, the same command goes on from the last save. Afterwards OUT/adapters holds the adapters in
    PEFT's format: kimi-jax generate DIR --adapters OUT.
    """

    directory: tyro.conf.Positional[Path]
    """A Hugging Face or converted checkpoint directory with tiktoken.model, or demo-k3 for the bundled one."""
    data: tuple[Path, ...]
    """Files of JSON lines: {"text": …} or {"messages": […]}; in a job every process reads them all."""
    out: Path
    """Directory of the run: new, or that of a run to go on with."""
    config: Path | None = None
    """Settings, a TOML file as in configs/finetune; without it the defaults."""
    held_out: tuple[Path, ...] = ()
    """Files of the same form that are only evaluated."""
    steps: int | None = None
    """Batches in all, in place of the settings' number."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard to OUT/tensorboard; needs the extra kimi_jax[tensorboard]."""
    job: Annotated[JobFlags, tyro.conf.arg(name="")] = field(default_factory=JobFlags)
    """Several processes that run this together."""

    def run(self) -> None:
        """Trains."""
        if not self.data:
            raise UsageError("--data names no file")
        directory = find_checkpoint(self.directory)
        model_config = ModelConfig.from_file(directory)
        if self.adapters is not None:
            adapter_folder(self.adapters)  # that there are none is told before anything is made
        config = FinetuneConfig() if self.config is None else read_settings(self.config, FinetuneConfig)
        try:
            if self.steps is not None:
                config = replace(config, run=replace(config.run, steps=self.steps))
            config.optimizer.check_steps(config.run.steps)
            if self.adapters is not None:
                remark("training goes on from the given adapters: of [lora] only the dropout is used")
            else:
                adapter_spec(model_config, config.lora)  # a wrong target is told before hours of loading
        except ValueError as error:
            raise UsageError(f"{'' if self.config is None else f'{self.config}: '}{error}") from None
        tokenizer = Tokenizer.from_directory(directory, expected_vocab_size=model_config.vocab_size)
        shape = mesh_shape(self.mesh)
        settings = {name: str(value) for name, value in asdict(replace(self, job=JobFlags())).items()}
        files: dict[str, Lines | DataError] = {}
        for name, paths in {"data": self.data, **({"held_out": self.held_out} if self.held_out else {})}.items():
            try:
                files[name] = Lines(paths)
            except DataError as error:  # told in the job, where the others hear of it
                files[name] = error
        settings |= {f"contents of {name}": x.digest if isinstance(x, Lines) else str(x) for name, x in files.items()}
        job = self.job.start(model_config, settings | {"settings": str(asdict(config))})
        mesh = job_mesh(job, shape)
        try:
            index, count = process_rows(mesh)
            documents = {name: _documents(lines, config, tokenizer) for name, lines in files.items()}
            data = config.data
            how: dict[str, Any] = {"rows": data.rows, "length": data.length, "packing": data.packing}
            how |= {"process_index": index, "process_count": count}
            batches = Batches(documents["data"], shuffle=data.shuffle, seed=config.run.seed, **how)
            held_out = None
            if "held_out" in documents:
                held_out = partial(Batches, documents["held_out"], shuffle=False, epochs=1, **how)
        except DataError:
            raise
        except ValueError as error:
            raise UsageError(str(error)) from None
        ways = 1 if mesh is None else mesh.shape["data"]
        if data.rows % ways:
            raise UsageError(f"rows {data.rows} of a batch cannot be divided over data={ways}")
        origin = {
            "model": str(directory.resolve()),
            "adapters": None if self.adapters is None else str(self.adapters.resolve()),
            "dtype": self.dtype,
            "dense_weights": self.dense_weights,
            "data": [str(path.resolve()) for path in self.data],
        }
        open_finetuning(self.out, config, origin)
        model = self.load(directory, mesh)
        trainer = Trainer(model, config.lora, make_optimizer(config.optimizer, config.run.steps), config.run.seed)
        numbers = sum(x.size for x in jax.tree.leaves(trainer.state.adapters))
        remark(f"{numbers:,} numbers are trained; the first step compiles")
        with run_progress(config.run.steps, self.out / "tensorboard" if self.tensorboard else None) as progress:
            run_finetuning(trainer, config, batches, held_out, self.out, origin=origin, report=progress.tell)
        emit(f"{self.out / 'adapters'}: adapters of step {config.run.steps}")


def _documents(lines: Lines | DataError, config: FinetuneConfig, tokenizer: Tokenizer) -> Documents:
    if isinstance(lines, DataError):
        raise lines
    data = config.data
    options = {} if data.thinking is None else {"thinking": data.thinking}
    how: dict[str, Any] = {"train_on": data.train_on, "on_error": data.on_error, "options": options, "report": remark}
    return Documents(lines, tokenizer, **how)
