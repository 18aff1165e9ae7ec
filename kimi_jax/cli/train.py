"""`kimi-jax train`: a small model trained whole."""

from dataclasses import dataclass
from pathlib import Path

from kimi_jax.cli.output import UsageError, emit, remark
from kimi_jax.cli.run_progress import run_progress
from kimi_jax.finetune.pretrain import PretrainConfig, Pretraining
from kimi_jax.finetune.settings import read_settings


@dataclass(frozen=True)
class Train:
    """Train a small model whole, every parameter in float32, and write it as a Hugging Face checkpoint.

    Stopped at any moment, the same command goes on from the last save. kimi-jax quantize packs the experts afterwards.
    """

    config: Path
    """Settings, a TOML file as configs/finetune/pretrain-tiny.toml; paths in it are seen from the current folder."""
    out: Path
    """Directory of the run: metrics.jsonl, the saved state, and at the end the checkpoint."""

    def run(self) -> None:
        """Trains."""
        config = read_settings(self.config, PretrainConfig)
        try:
            pretraining = Pretraining(config, self.out)
        except ValueError as error:
            raise UsageError(str(error)) from None
        remark(f"{len(pretraining.text.ids):,} tokens of text; the first step compiles")
        with run_progress(config.run.steps, None) as progress:
            pretraining.run(progress.tell)
        emit(f"{self.out / 'checkpoint'}: the model of step {config.run.steps}")
