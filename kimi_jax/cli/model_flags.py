"""Flags of the commands that load a model, and the loading, with its progress."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jax.sharding import Mesh

from kimi_jax.checkpoint.load import load_model
from kimi_jax.cli.output import byte_progress
from kimi_jax.model.model import Model


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """How a model is laid out and computed."""

    mesh: str = "none"
    """Devices by axis, e.g. data=2,tensor=4; none is one device. On a machine without accelerators that many CPU
    devices are made."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the computation."""
    dense_weights: Literal["bf16", "int8", "fp8"] = "bf16"
    """How weights that are not experts are kept: as in the checkpoint, or rounded to eight bits by output channel."""
    adapters: Path | None = None
    """Low-rank adapters for the checkpoint: a directory in PEFT's format, or of a run of kimi-jax finetune."""

    def load(self, directory: Path, mesh: Mesh | None) -> Model:
        """The checkpoint on the devices of `mesh`, with a bar on standard error."""
        with byte_progress("loading") as progress:
            return load_model(
                directory,
                mesh=mesh,
                dtype=self.dtype,
                dense_weights=self.dense_weights,
                adapters=self.adapters,
                progress=progress,
            )
