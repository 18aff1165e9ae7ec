"""Flags of commands that several processes run together, and how such a command starts."""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from kimi_jax.cli.output import UsageError, only_first_prints
from kimi_jax.config import ModelConfig
from kimi_jax.parallel.distributed import start
from kimi_jax.parallel.launch_environment import DistributedError, Job, find_job
from kimi_jax.parallel.mesh import ask_for_cpu_devices, make_mesh, parse_mesh


@dataclass(frozen=True)
class JobFlags:
    """Which process of how many this is; the scripts in `launch/` say it through the environment."""

    coordinator: str | None = None
    """host:port where process 0 listens, or auto on a Cloud TPU VM or GKE."""
    process_index: int | None = None
    """Which of the processes this is, from 0."""
    process_count: int | None = None
    """Processes that run this command together."""

    def find(self) -> Job | None:
        """The job by flags, then by the environment. **Raises:** `UsageError` where they do not fit together."""
        try:
            return find_job(self.coordinator, self.process_index, self.process_count)
        except DistributedError as error:
            raise UsageError(str(error)) from None

    def start(self, config: ModelConfig, settings: Mapping[str, Any]) -> Job | None:
        """Joins the job, where there is one; from then on only process 0 prints."""
        job = self.find()
        if job is None:
            return None
        only_first_prints(job.index)
        _keep_standard_output()
        job = start(job, config=config, settings=settings)
        only_first_prints(None if job is None else job.index)
        return job


def mesh_shape(text: str) -> dict[str, int] | None:
    """What `--mesh` says. **Raises:** `UsageError` where it cannot be read."""
    try:
        return parse_mesh(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def job_mesh(job: Job | None, shape: Mapping[str, int] | None) -> Mesh | None:
    """The mesh of a command: over CPU devices made for it where the process is alone, over all devices of a job.

    **Raises:** `MeshError` where it cannot be made, `UsageError` where it leaves devices of a job out.
    """
    if job is None:
        if shape is not None:
            ask_for_cpu_devices(math.prod(shape.values()))
        return make_mesh(shape)
    mesh, devices = make_mesh(shape), jax.device_count()
    if mesh is None or mesh.size != devices:
        raise UsageError(
            f"{job.count} processes have {devices} devices together, --mesh must use them all: its sizes multiply to "
            f"{1 if mesh is None else mesh.size}"
        )
    return mesh


def _keep_standard_output() -> None:
    """Leaves standard output to results: the CPU runtime's own lines go to standard error."""
    sys.stdout.flush()
    results = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)
    sys.stdout = results
