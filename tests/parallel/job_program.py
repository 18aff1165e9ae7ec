"""What the processes of `test_distributed.py` run, instead of `kimi-jax`: `job_program.py MODE …`."""

import ctypes
import dataclasses
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.config import ModelConfig
from kimi_jax.parallel.distributed import fail, fetch, finish, start
from kimi_jax.parallel.launch_environment import DistributedError, find_job

INDEX = int(os.environ["KIMI_PROCESS_ID"])


def summed(check=lambda: None):
    """A function that sums one number a device, and its argument."""
    mesh = Mesh(np.asarray(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    ones = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.ones(1, np.float32))

    def total(x):
        check()
        return jnp.cumsum(x)

    return jax.jit(total, out_shardings=sharding), ones


def collectives():
    """Exchanges arrays until killed; says so once, with the pid."""
    start()
    function, ones = summed()
    for step in range(100_000):
        np.testing.assert_array_equal(fetch(function(ones)), np.arange(1, ones.size + 1))
        if step == 3:
            os.write(1, f"running {INDEX} {os.getpid()}\n".encode())


def sleeping():
    """Waits without any exchange until killed."""
    start()
    os.write(1, f"running {INDEX} {os.getpid()}\n".encode())
    time.sleep(100)


def raising():
    """Process 1 raises where the others compute."""
    start()
    function, ones = summed()
    if INDEX == 1:
        raise ValueError("a corrupt shard")
    fetch(function(ones))


def differing(what):
    """Process 1 runs something else."""
    config = ModelConfig.from_file(sys.argv[3])
    if INDEX == 1 and what == "configuration":
        config = dataclasses.replace(config, norm_eps=0.5)
    if INDEX == 1 and what == "version":
        import kimi_jax.version

        kimi_jax.version.__version__ = "0.0.1"
    try:
        start(config=config)
    except DistributedError as error:
        print(error, file=sys.stderr)
        fail(error, 1)


def missing():
    """Waits for a process that does not come."""
    start(dataclasses.replace(find_job(), count=3), start_seconds=6)


def compiling(seconds, limit):
    """Traces and compiles for longer than the heartbeat limit, and lets no Python thread run meanwhile."""
    start(heartbeat_seconds=int(limit))
    hold = ctypes.PyDLL(None).sleep  # keeps the interpreter's lock
    function, ones = summed(check=lambda: hold(int(seconds)))
    begun = time.monotonic()
    np.testing.assert_array_equal(fetch(function(ones)), np.arange(1, ones.size + 1))
    assert time.monotonic() - begun > float(seconds)
    finish()
    if INDEX == 0:
        print("survived")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:3] if sys.argv[1] == "differing" else sys.argv[2:])
