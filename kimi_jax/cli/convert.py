"""`kimi-jax convert`, `verify` and `export`: checkpoints from Hugging Face's form to ours and back."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from kimi_jax.checkpoint.convert import check_processes, convert
from kimi_jax.checkpoint.export import export
from kimi_jax.checkpoint.storage import local_destination
from kimi_jax.checkpoint.verify import verify
from kimi_jax.cli.bundled import find_source
from kimi_jax.cli.job import JobFlags
from kimi_jax.cli.output import UsageError, check_destination, emit, named_byte_progress, only_first_prints, parse_bytes
from kimi_jax.parallel.launch_environment import Job


@dataclass(frozen=True)
class Convert:
    """Convert a Hugging Face checkpoint into one that any mesh restores from, or go on with a stopped conversion.

    Experts stay packed. Killed at any instant, the same command goes on: what is there is compared with its digests,
    the rest is made. Several processes (on one or more hosts that share the destination) divide the layers among
    themselves: by --process-index and --process-count, or as a script in launch/ tells them.
    """

    source: tyro.conf.Positional[str]
    """A Hugging Face directory, its URL (gs://…, s3://…; needs the extra kimi_jax[remote]), or tiny-k3 or demo-k3 for a
    bundled one."""
    directory: tyro.conf.Positional[Path]
    """Where the converted checkpoint goes."""
    max_memory: str = "16GB"
    """Memory the process may use, e.g. 4GB or 500MiB, besides 1 GB for the interpreter and the names."""
    overwrite: bool = False
    """Take a finished conversion up again: parts of the same source that prove right stay, the rest is made anew."""
    job: Annotated[JobFlags, tyro.conf.arg(name="")] = field(default_factory=JobFlags)
    """Several processes that run this together."""

    def run(self) -> None:
        """Converts."""
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        index, count = self._place()
        try:
            max_memory = parse_bytes(self.max_memory)
            local_destination(self.directory)
            check_processes(index, count, self.overwrite)
        except ValueError as error:
            raise UsageError(str(error)) from None
        with named_byte_progress() as progress:
            manifest = convert(
                find_source(self.source),
                self.directory,
                max_memory=max_memory,
                overwrite=self.overwrite,
                process_index=index,
                process_count=count,
                progress=progress,
            )
        parts = len(manifest.parts)
        if manifest.complete:
            only_first_prints(None)  # the last process of a job may be another than process 0
            emit(f"{self.directory}: complete, {parts} parts")
        else:
            emit(f"{self.directory}: {manifest.done} of {parts} parts are done; the other processes go on")

    def _place(self) -> tuple[int, int]:
        """Which process of how many this is; nothing else connects them, JAX's start-up is not needed."""
        index, count = self.job.process_index, self.job.process_count
        job = None if index is not None and count is not None else JobFlags().find()
        if index is None and count is None and job is not None:
            if job.index is None or job.count is None:
                raise UsageError("which process this is is not known: give --process-index and --process-count")
            only_first_prints(job.index)
        known = job or Job()
        # `convert` refuses numbers that do not fit together.
        return (index if index is not None else known.index or 0), (count if count is not None else known.count or 1)


@dataclass(frozen=True)
class Verify:
    """Read a converted checkpoint whole and compare every tensor with its digest, or with its source.

    Exit code 1 with the first differing tensor (and element) where something differs.
    """

    directory: tyro.conf.Positional[Path]
    """A converted checkpoint."""
    against: str | None = None
    """The Hugging Face directory or URL it was made of."""

    def run(self) -> None:
        """Compares."""
        with named_byte_progress() as progress:
            count = verify(self.directory, self.against, progress)
        emit(f"{self.directory}: {count} arrays, all equal to their {'digests' if self.against is None else 'source'}")


@dataclass(frozen=True)
class Export:
    """Write the Hugging Face files that a converted checkpoint was made of, byte for byte."""

    directory: tyro.conf.Positional[Path]
    """A converted checkpoint."""
    out: tyro.conf.Positional[Path]
    """A new directory."""
    overwrite: bool = False
    """Write into a directory that is not empty, replacing files of the same names."""

    def run(self) -> None:
        """Exports."""
        check_destination(self.out)
        with named_byte_progress() as progress:
            count = export(self.directory, self.out, overwrite=self.overwrite, progress=progress)
        emit(f"{self.out}: {count} safetensors files")
