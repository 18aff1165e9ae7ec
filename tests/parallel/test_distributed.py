"""Jobs of several processes, started by `launch/local.sh`: golden tokens, differing hosts, deaths."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from kimi_jax.parallel.launch_environment import DistributedError, Job, find_job

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "job_program.py"
TINY = ROOT / "kimi_jax" / "data" / "tiny-k3"
pytestmark = pytest.mark.xdist_group("jobs")


@contextmanager
def local(processes, devices, *arguments, program=f"{PROGRAM}"):
    """A job of `launch/local.sh`; it is interrupted where it has not ended by itself."""
    environment = {
        **os.environ,
        "KIMI_JAX": f"{sys.executable} {program}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [ROOT / "launch" / "local.sh", processes, devices, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([str(part) for part in command], env=environment, **pipes) as job:
        try:
            yield job
        finally:
            if job.poll() is None:
                job.terminate()


def run(*arguments, **options):
    with local(*arguments, **options) as job:
        out, err = job.communicate(timeout=500)
        return job.returncode, out, err


def test_generate_gives_the_golden_tokens(tiny, golden):
    processes, devices = 2, 4
    data = golden("tiny-k31")
    options = ("--mesh", "data=2,tensor=4", "--dtype", "float32", "--max-new-tokens", len(data["greedy_new_ids"]))
    prompt = ("--stop-ids", "--prompt-ids", *data["greedy_prompt_ids"])
    directory = tiny.directory("tiny-k31")
    code, out, err = run(processes, devices, "generate", directory, *options, *prompt, program="-m kimi_jax.cli.main")
    assert code == 0, err
    assert [int(word) for word in out.split()] == data["greedy_new_ids"].tolist(), err
    for index in range(processes):
        assert f"process {index} of {processes}: host " in err
    assert err.count("prompt tokens; the first steps compile") == 1


def test_convert_divides_the_layers(tmp_path):
    code, out, err = run(2, 1, "convert", TINY, tmp_path / "converted", program="-m kimi_jax.cli.main")
    assert code == 0, err
    assert "complete, 10 parts" in out
    assert json.loads((tmp_path / "converted" / "manifest.json").read_text())["complete"]


@pytest.mark.parametrize("victim", [0, 1])
def test_others_end_when_a_process_is_killed(victim):
    with local(3, 1, "collectives") as job:
        lines = (re.search(r"running (\d) (\d+)", line) for line in job.stdout)
        pids = dict(islice((line.groups() for line in lines if line), 3))
        killed = time.monotonic()
        os.kill(int(pids[str(victim)]), signal.SIGKILL)
        _, err = job.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert job.returncode == 128 + signal.SIGKILL
    assert f"launch/local.sh: process {victim} (pid {pids[str(victim)]}) ended with code 137" in err
    # Where process 0 is gone, JAX's own message may be the first on a process.
    assert re.search(rf"process {victim} \(\S+\) died; process \d \(\S+\) ends too|leader task was preempted/died", err)
    if victim:
        assert len(re.findall(rf"process {victim} \(\S+\) died; process \d \(\S+\) ends too", err)) == 2
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_others_end_with_the_reason_of_a_process_that_fails():
    code, _, err = run(2, 1, "raising")
    assert code == 1
    assert re.search(r"process 1 \(\S+\) failed: a corrupt shard; process 0 \(\S+\) ends too", err)


@pytest.mark.parametrize(
    ("what", "field"),
    [
        ("configuration", r"configuration norm_eps is 0\.5, on process 0 \(\S+\) it is 1e-05"),
        ("version", r"version of kimi_jax is 0\.0\.1, on process 0 \(\S+\) it is \S+"),
    ],
)
def test_a_host_that_runs_something_else_is_named(what, field):
    code, _, err = run(2, 1, "differing", what, TINY)
    assert code == 1
    assert re.search(rf"process 1 \(\S+\) differs: {field}", err)


def test_missing_processes_end_the_start():
    code, _, err = run(2, 1, "missing")
    assert code == 1
    assert "process 0 of 3 cannot join the job at 127.0.0.1:" in err


def test_tracing_and_compiling_longer_than_the_heartbeat_limit_survives():
    code, out, err = run(2, 1, "compiling", 14, 5)
    assert code == 0, err
    assert "survived" in out


STEP = {
    "SLURM_JOB_ID": "4100",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}
POD = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}


@pytest.mark.parametrize(
    ("environment", "flags", "job"),
    [
        ({}, {}, None),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, {}, None),
        (POD, {}, None),
        ({"KIMI_PROCESS_ID": "1", "KIMI_PROCESS_COUNT": "2"}, {}, Job(None, 1, 2)),
        ({"KIMI_COORDINATOR": "h:1", "KIMI_PROCESS_ID": "1", "KIMI_PROCESS_COUNT": "2"}, {}, Job("h:1", 1, 2)),
        ({"KIMI_COORDINATOR": "auto"}, {}, Job("auto")),
        ({"KIMI_COORDINATOR": "auto", **POD}, {}, Job("auto", 1, 2)),
        (STEP, {}, Job("gpu007:61444", 3, 4, (1,))),
        (STEP | {"CUDA_VISIBLE_DEVICES": "1"}, {}, Job("gpu007:61444", 3, 4)),
        (STEP | {"SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NODELIST": "a,b[1-3]"}, {}, Job("a:61444", 3, 4)),
        (STEP, {"coordinator": "h:2", "index": 0, "count": 2}, Job("h:2", 0, 2, (1,))),
        ({}, {"coordinator": "h:2", "index": 0, "count": 2}, Job("h:2", 0, 2)),
    ],
)
def test_find_job(environment, flags, job):
    assert find_job(**flags, environment=environment) == job


@pytest.mark.parametrize(
    ("environment", "flags", "error"),
    [
        ({"KIMI_PROCESS_ID": "one"}, {}, "KIMI_PROCESS_ID='one' in the environment is not a number"),
        ({"KIMI_PROCESS_ID": "1"}, {}, "give --process-count"),
        ({}, {"count": 2}, "give --process-index"),
        ({}, {"coordinator": "h:2"}, "give --process-index and --process-count"),
        ({}, {"coordinator": "h", "index": 0, "count": 2}, "'h' is not host:port"),
        ({}, {"coordinator": "h:1", "index": 2, "count": 2}, "must be from 0 to 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(environment, flags, error):
    with pytest.raises(DistributedError, match=re.escape(error)):
        find_job(**flags, environment=environment)
