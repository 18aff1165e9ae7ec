"""Jobs of several processes: start-up, the check that all run the same, and an end that says who ended first.

```python
from kimi_jax.parallel.distributed import finish, start

start()  # before anything of JAX runs; does nothing where a process is alone
...
finish()
```

Every process then calls the same functions with the same values, as JAX asks for.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src.distributed import global_state  # JAX has no public door to its key-value store
from jax.experimental import multihost_utils

from kimi_jax import version
from kimi_jax.config import ModelConfig
from kimi_jax.parallel.launch_environment import DistributedError, Job, find_job
from kimi_jax.parallel.watch import Watch, say

HEARTBEAT_SECONDS = 40
"""A process that sends no heartbeat for so long is dead. Threads of the runtime send them, whatever Python does."""
START_SECONDS = 300
"""How long processes wait for each other at start-up and at the end."""
_ELSEWHERE = re.compile("gloo|nccl|unavailable|connection (reset|closed|refused)|heartbeat", re.IGNORECASE)
"""What the runtime's errors say where another process's end is their cause."""

_watch: Watch | None = None


def start(
    job: Job | None = None,
    *,
    config: ModelConfig | None = None,
    settings: Mapping[str, Any] | None = None,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    start_seconds: int = START_SECONDS,
) -> Job | None:
    """Joins the job, where there is one, before JAX's first computation, and prints one line about this process.

    **Arguments:**

    - `job`: from `find_job`; None looks at the environment.
    - `config`, `settings`: what must be the same everywhere, besides the versions of the packages.

    **Returns:** the job with index and count; None where this process is alone.

    **Raises:** `DistributedError` where processes are missing, or naming the process and the field that differs.
    """
    global _watch
    job = find_job() if job is None else job
    if job is None:
        return None
    if job.coordinator is None:
        raise DistributedError("which process this is is known, but not where process 0 listens: give --coordinator")
    if _watch is not None:
        raise DistributedError("this process has joined a job already")
    _initialize(job, heartbeat_seconds, start_seconds)
    host, index, count = socket.gethostname(), global_state.process_id, global_state.num_processes
    client: Any = global_state.client
    until = time.monotonic() + start_seconds
    watch = Watch(index, count, host)
    address = str(global_state.coordinator_address).rpartition(":")[0].strip("[]")
    try:
        if index == 0:
            client.key_value_set("kimi_jax/watch", watch.serve(loopback=_is_loopback(address)))
        else:
            watch.join(address, client.blocking_key_value_get("kimi_jax/watch", start_seconds * 1000), start_seconds)
    except OSError as error:
        say(f"process {index} ({host}) cannot reach process 0 to watch it ({error}); JAX's heartbeats are left")
    _watch = watch
    sys.excepthook = _fail_on_exception
    try:
        _check_same(client, index, count, _identity(host, config, settings or {}), until)
        devices = jax.local_devices()
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(f"start-up: {_first_line(error)}") from None
    kind = devices[0].device_kind if devices else "no"
    say(f"process {index} of {count}: host {host}, {len(devices)} local devices ({kind})")
    return dataclasses.replace(job, index=index, count=count)


def finish() -> None:
    """Waits for the other processes and leaves the job. **Raises:** `DistributedError` where they do not come."""
    global _watch
    if _watch is None:
        return
    _watch.done()
    try:
        jax.distributed.shutdown()
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(f"the job did not end together: {_first_line(error)}") from None
    _watch = None
    sys.excepthook = sys.__excepthook__


def is_joined() -> bool:
    """Whether this process belongs to a running job."""
    return _watch is not None


def fail(error: BaseException | str, code: int) -> NoReturn:
    """Tells the other processes why this one ends, and ends it: leaving in the ordinary way would wait for them."""
    assert _watch is not None
    _watch.fail(_first_line(error) or type(error).__name__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fetch(tree: Any) -> Any:
    """Arrays, wherever they lie, as NumPy's on every process; every process must ask for the same.

    Moves: where an array does not lie whole on each process, an all-gather of it.
    """

    def one(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            return multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(one, tree)


def _initialize(job: Job, heartbeat_seconds: int, start_seconds: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # of the CPU backend alone
    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM from ending a process
    given: dict[str, Any] = {"num_processes": job.count, "process_id": job.index}
    if job.coordinator != "auto":
        host = str(job.coordinator).rpartition(":")[0]
        given |= {"coordinator_address": job.coordinator, "cluster_detection_method": "deactivate"}
        given["local_device_ids"] = job.local_devices
        if _is_loopback(host):
            given["coordinator_bind_address"] = job.coordinator
    # JAX itself would end the process with a signal and a stack trace.
    patience = threading.Timer(start_seconds, _give_up, (job, start_seconds))
    patience.daemon = True
    patience.start()
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=start_seconds + 30,
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=start_seconds,
        )
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise DistributedError(
            f"process {job.index} of {job.count} cannot join the job at {job.coordinator}: {_first_line(error)}"
        ) from None
    finally:
        patience.cancel()


def _give_up(job: Job, seconds: int) -> NoReturn:
    say(
        f"process {job.index} of {job.count} cannot join the job at {job.coordinator}: the others did not all come in "
        f"{seconds} s; see which of them did not start, and whether that address can be reached"
    )
    os._exit(1)


def _identity(host: str, config: ModelConfig | None, settings: Mapping[str, Any]) -> dict[str, str]:
    """What must be equal on all processes, by field; long values by digest."""
    fields: dict[str, Any] = {
        f"version of {name}": _version(name) for name in ("kimi_jax", "jax", "jaxlib", "flax", "numpy")
    }
    fields |= {f"setting {name}": value for name, value in settings.items()}
    if config is not None:
        fields |= {f"configuration {f.name}": getattr(config, f.name) for f in dataclasses.fields(config)}
    shown = {name: str(value) if isinstance(value, str) else repr(value) for name, value in fields.items()}
    return {"host": host} | {
        name: text if len(text) <= 80 else f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        for name, text in shown.items()
    }


def _version(package: str) -> str:
    if package == "kimi_jax":
        return version.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _check_same(client: Any, index: int, count: int, mine: dict[str, str], until: float) -> None:
    """Process 0 compares what all run with what it runs itself, and publishes the verdict."""
    left = lambda: max(1, int(1000 * (until - time.monotonic())))  # noqa: E731
    if index > 0:
        client.key_value_set(f"kimi_jax/identity/{index}", json.dumps(mine))
        verdict = client.blocking_key_value_get("kimi_jax/verdict", left())
    else:
        verdict = "same"
        for other in range(1, count):
            theirs = json.loads(client.blocking_key_value_get(f"kimi_jax/identity/{other}", left()))
            difference = _difference(mine, theirs, other)
            if difference is not None:
                verdict = difference
                break
        client.key_value_set("kimi_jax/verdict", verdict)
    if verdict != "same":
        raise DistributedError(verdict)


def _difference(mine: dict[str, str], theirs: dict[str, str], other: int) -> str | None:
    for field in {**mine, **theirs}:
        if field != "host" and mine.get(field) != theirs.get(field):
            return (
                f"process {other} ({theirs['host']}) differs: {field} is {theirs.get(field, 'missing')}, "
                f"on process 0 ({mine['host']}) it is {mine.get(field, 'missing')}"
            )
    return None


def _fail_on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    runtime = kind in (jax.errors.JaxRuntimeError, RuntimeError, ValueError)
    if _watch is not None and runtime and _ELSEWHERE.search(str(error)):
        time.sleep(HEARTBEAT_SECONDS)  # the watch says who ended, and ends this process
    traceback.print_exception(kind, error, trace)
    if _watch is not None:
        fail(error, 130 if isinstance(error, KeyboardInterrupt) else 1)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def _first_line(error: BaseException | str) -> str:
    return str(error).strip().partition("\n")[0]
