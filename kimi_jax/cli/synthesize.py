"""`kimi-jax synthesize`: a checkpoint with random weights in the real layout."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from kimi_jax.checkpoint.storage import local_destination
from kimi_jax.checkpoint.synthesize import synthesize
from kimi_jax.cli.output import UsageError, named_byte_progress, parse_bytes
from kimi_jax.config import ConfigError, find_config


@dataclass(frozen=True)
class Synthesize:
    """Write a checkpoint with random weights in the real layout, of any configuration: for dry runs and benchmarks.

    kimi-k3 takes 1.56 TB; see `kimi-jax inspect` for the bytes of a configuration.
    """

    config: tyro.conf.Positional[str]
    """A config.json, a directory that holds one, or a shipped name such as tiny-k3."""
    out: tyro.conf.Positional[Path]
    """A new directory."""
    seed: int = 0
    """Of the weights; the same seed gives the same bytes."""
    file_size: str = "16.7GB"
    """A new file is begun when one would pass this size."""

    def run(self) -> None:
        """Writes it."""
        try:
            find_config(self.config)
            local_destination(self.out)
            if self.seed < 0:
                raise UsageError(f"--seed {self.seed} must be at least 0")
            file_bytes = parse_bytes(self.file_size)
        except (ConfigError, ValueError) as error:
            raise UsageError(str(error)) from None
        with named_byte_progress("preparing") as progress:
            count = synthesize(self.config, self.out, seed=self.seed, file_bytes=file_bytes, progress=progress)
        print(f"{self.out}: {count} safetensors files")
