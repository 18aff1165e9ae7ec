"""Which process of how many this is, from the variables that launchers set."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

AUTO = "auto"
"""A coordinator's address that JAX finds out by itself (Cloud TPU VM, GKE)."""


class DistributedError(RuntimeError):
    """A job of several processes that cannot start or go on."""


@dataclass(frozen=True)
class Job:
    """This process's place among those that run the same command.

    - `coordinator`: `host:port` where process 0 listens; `AUTO`: JAX finds it; None where nobody said.
    - `index`, `count`: None where JAX finds them.
    - `local_devices`: of the host's devices those that this process uses; None means all.
    """

    coordinator: str | None = None
    index: int | None = None
    count: int | None = None
    local_devices: tuple[int, ...] | None = None


def find_job(
    coordinator: str | None = None,
    index: int | None = None,
    count: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Job | None:
    """The job that this process belongs to; None where it is alone.

    **Arguments:**

    - `coordinator`, `index`, `count`: what flags say; each goes before the environment.
    - `environment`: `KIMI_COORDINATOR`, `KIMI_PROCESS_ID` and `KIMI_PROCESS_COUNT` (`launch/local.sh`,
        `launch/tpu_vm.sh`); or those of a step of SLURM; or `TPU_WORKER_ID` and `TPU_WORKER_HOSTNAMES` (GKE).

    **Raises:** `DistributedError` where the numbers do not fit together.
    """
    found = _from_environment(environment)
    job = Job(
        coordinator or found.coordinator,
        found.index if index is None else index,
        found.count if count is None else count,
        found.local_devices,
    )
    if job.coordinator == AUTO and (job.index is None or job.count is None):
        return Job(AUTO, job.index, job.count)
    if (job.index is None) != (job.count is None):
        known, missing = ("count", "index") if job.index is None else ("index", "count")
        raise DistributedError(f"the process {known} is known, the {missing} is not: give --process-{missing}")
    if job.index is None or job.count is None:
        if job.coordinator is not None:
            raise DistributedError(
                f"coordinator {job.coordinator} is known, but not which process this is: give --process-index and "
                "--process-count"
            )
        return None
    if not 0 <= job.index < job.count:
        raise DistributedError(
            f"process index {job.index} must be from 0 to {job.count - 1}: the job has {job.count} processes"
        )
    if job.coordinator not in (None, AUTO) and not re.fullmatch(r".+:\d+", str(job.coordinator)):
        raise DistributedError(f"coordinator {job.coordinator!r} is not host:port")
    return job


def _from_environment(environment: Mapping[str, str]) -> Job:
    def number(name: str) -> int | None:
        text = environment.get(name, "")
        if text and not text.isdecimal():
            raise DistributedError(f"{name}={text!r} in the environment is not a number")
        return int(text) if text else None

    names = ("KIMI_COORDINATOR", "KIMI_PROCESS_ID", "KIMI_PROCESS_COUNT")
    if any(environment.get(name) for name in names):
        own = Job(environment.get(names[0]) or None, number(names[1]), number(names[2]))
        hosts = [host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
        if own.coordinator == AUTO and own.index is None and hosts and not environment.get("MEGASCALE_NUM_SLICES"):
            return Job(AUTO, number("TPU_WORKER_ID"), len(hosts))
        return own
    # Of SLURM's variables only those of a step count: the batch script itself is no task of the job.
    tasks, nodes = number("SLURM_STEP_NUM_TASKS"), number("SLURM_STEP_NUM_NODES")
    if tasks is not None and tasks > 1 and environment.get("SLURM_STEP_NODELIST"):
        host = _first_host(environment["SLURM_STEP_NODELIST"])
        port = 61440 + (number("SLURM_JOB_ID") or 0) % 4096
        local = number("SLURM_LOCALID")
        shared = nodes is not None and tasks > nodes and "," in environment.get("CUDA_VISIBLE_DEVICES", ",")
        devices = (local,) if shared and local is not None else None
        return Job(f"{host}:{port}", number("SLURM_PROCID"), tasks, devices)
    return Job()


def _first_host(nodes: str) -> str:
    """`"gpu[007-010,015],other"` → `"gpu007"`."""
    found = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if found is None:
        raise DistributedError(f"cannot read the list of nodes {nodes!r}")
    return found[1] + (found[2] or "")
