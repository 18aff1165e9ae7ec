"""`kimi-jax merge`: adapters into the weights."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from kimi_jax.checkpoint.merge import LEAST_SURVIVAL, merge
from kimi_jax.cli.bundled import find_source
from kimi_jax.cli.output import check_destination, console, emit, named_byte_progress, print_table


@dataclass(frozen=True)
class Merge:
    """Write a checkpoint with adapters merged into its weights.

    Into bfloat16 and float32 modules exactly: summed in float64, rounded once. MXFP4 experts are changed on request
    only; the share of each layer's update that survived their rounding is printed, and less than a half is refused.
    """

    directory: tyro.conf.Positional[str]
    """The Hugging Face directory below the adapters, its URL (gs://…, s3://…; needs the extra kimi_jax[remote]), or a
    bundled checkpoint's name."""
    run_directory: tyro.conf.Positional[Path]
    """A folder with adapter_config.json, or a training run's."""
    out: tyro.conf.Positional[Path]
    """A new directory."""
    experts: bool = False
    """Merge into MXFP4 experts too, with rounding."""
    force: bool = False
    """Write also where too little of an update survives rounding."""

    def run(self) -> None:
        """Merges, and prints what survived."""
        check_destination(self.out)
        with named_byte_progress() as progress:
            done = merge(
                find_source(self.directory),
                self.run_directory,
                self.out,
                experts=self.experts,
                force=self.force,
                progress=progress,
            )
        if done.survival:
            rows = [(str(layer), f"{share:.1%}") for layer, share in done.survival.items()]
            title = f"Updates of MXFP4 experts after rounding (at least {LEAST_SURVIVAL:.0%} wanted)"
            print_table(console(), title, ("layer", "survived"), rows)
        emit(f"{self.out}: {done.modules} modules changed")
