"""`kimi-jax train`: a small model trained whole."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax.cli.output import emit
from kimi_jax.finetune.pretrain import Trainer
from kimi_jax.finetune.recipe import Recipe


@dataclass(frozen=True)
class Train:
    """Train a small model whole, every parameter in float32, and write it as a Hugging Face checkpoint.

    Paths in the recipe are relative to the current folder. A run that was stopped goes on from its last save.
    """

    config: Path
    """The recipe, such as configs/finetune/pretrain-tiny.toml."""
    out: Path
    """Folder of the run: metrics.jsonl, the saved state, and at the end the checkpoint."""

    def run(self) -> None:
        """Trains."""
        trainer = Trainer(Recipe.from_file(self.config), self.out)
        emit(f"{trainer.text.size:,} bytes, {len(trainer.text.ids):,} tokens of text")
        trainer.run(_show)
        emit(f"{self.out / 'checkpoint'}: written")


def _show(line: dict[str, Any]) -> None:
    emit("  ".join(f"{name} {value}" for name, value in line.items()))
