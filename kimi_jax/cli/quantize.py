"""`kimi-jax quantize`: float experts to MXFP4."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from kimi_jax.checkpoint.quantize import quantize_checkpoint
from kimi_jax.cli.output import check_destination, console, emit, named_byte_progress, print_table


@dataclass(frozen=True)
class Quantize:
    """Write a checkpoint whose routed experts are MXFP4, as K3's are, from one with bfloat16 or float32 experts.

    All other tensors and files are copied. Each group of 32 inputs gets the power of two for its scale that leaves the
    smaller squared error, of the two that its largest magnitude suggests.
    """

    directory: tyro.conf.Positional[str]
    """A Hugging Face directory, or its URL (gs://…, s3://…; needs the extra kimi_jax[remote])."""
    out: tyro.conf.Positional[Path]
    """A new directory."""

    def run(self) -> None:
        """Quantises and prints each layer's error."""
        check_destination(self.out)
        with named_byte_progress() as progress:
            errors = quantize_checkpoint(self.directory, self.out, progress=progress)
        rows = [(str(layer), f"{error:.4f}") for layer, error in errors.items()]
        print_table(console(), "Rounding of the experts", ("layer", "relative RMS error"), rows)
        emit(f"{self.out}: experts of {len(errors)} layers in MXFP4")
