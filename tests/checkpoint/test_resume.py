"""Conversions that end before they are done, and what the next run trusts: digests, and nothing else."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.export import export
from kimi_jax.checkpoint.manifest import part_folder, read_manifest, record_file
from kimi_jax.checkpoint.safetensors_file import CheckpointFiles
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.checkpoint.synthesize import synthesize
from kimi_jax.checkpoint.verify import verify
from kimi_jax.config import ConfigError

pytestmark = pytest.mark.xdist_group("resume")
THREE_LAYERS = Path(__file__).parent / "three-layers.json"
KILLS = 20


def content(directory):
    """Bytes of every file of a folder by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of three layers in four files, with a vision tower."""
    out = tmp_path_factory.mktemp("source") / "checkpoint"
    synthesize(THREE_LAYERS, out, file_bytes=300_000)
    return out


@pytest.fixture(scope="module")
def begun(source, tmp_path_factory):
    """A conversion of `source` with three of five parts done; not to be changed."""
    out = tmp_path_factory.mktemp("begun") / "checkpoint"
    assert convert(source, out, process_count=2).done == 3
    return out


@pytest.fixture
def half(begun, tmp_path):
    """A copy of `begun`, to be damaged."""
    return shutil.copytree(begun, tmp_path / "half")


def done_parts(directory):
    return [part for part, digest in read_manifest(directory).parts.items() if digest is not None]


def files_of(directory, part):
    """Inode and time of change of every file of a part: those of a part made anew differ."""
    paths = [record_file(directory, part), *part_folder(directory, part).rglob("*")]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def assert_whole(directory, source, out):
    """The conversion is finished, equal to its source, and exports its very files."""
    assert read_manifest(directory).complete
    verify(directory, source)
    export(directory, out)
    assert content(out) == content(source)
    assert [path.name for path in (directory / "params").glob("*.orbax*")] == []


def finish(directory, source):
    """Converts what is missing of the parts that `begun` has, and tells which of them were made anew."""
    parts = [part for part in read_manifest(directory).parts if record_file(directory, part).is_file()]
    before = {part: files_of(directory, part) for part in parts}
    convert(source, directory, process_count=2)
    return {part for part in parts if files_of(directory, part) != before[part]}


def test_finished_parts_are_not_made_again(half, source):
    assert done_parts(half) == list(read_manifest(half).parts)[::2]
    assert finish(half, source) == set()
    assert convert(source, half).complete
    verify(half, source)


def test_flipped_byte_has_its_part_made_anew(half, source):
    part = next(part for part in done_parts(half) if part.startswith("layers."))
    name = next(
        name for name in CheckpointFiles(source).tensors if f".{part}." in name and name.endswith("k_proj.weight")
    )
    row = CheckpointFiles(source).read(name)[:16].tobytes()
    (file,) = [path for path in part_folder(half, part).glob("*/c/**/*") if path.is_file() and row in path.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(row) + 77] ^= 1
    file.write_bytes(data)
    assert finish(half, source) == {part}
    assert done_parts(half) == list(read_manifest(half).parts)[::2]


def test_missing_data_has_its_part_made_anew(half, source):
    part = done_parts(half)[1]
    shutil.rmtree(next(part_folder(half, part).glob("*/c")))
    assert finish(half, source) == {part}


def test_part_without_record_is_made_anew(half, source):
    part = done_parts(half)[0]
    before = files_of(half, part)
    record_file(half, part).unlink()
    assert finish(half, source) == set()
    after = files_of(half, part)
    assert all(after.get(path) != found for path, found in before.items() if path.endswith("zarr.json"))
    assert part in done_parts(half)


def test_record_that_lies_has_its_part_made_anew(half, source):
    part = done_parts(half)[2]
    path = record_file(half, part)
    record = json.loads(path.read_text())
    digests = next(iter(record["arrays"].values()))["digests"]
    digests[-1] = digests[-1][:-1] + ("0" if digests[-1][-1] != "0" else "1")
    path.write_text(json.dumps(record))
    assert finish(half, source) == {part}


@pytest.mark.parametrize("text", ["", "[]", '{"norm.weight": {"shape": [128]}}', "{}"])
def test_damaged_record_has_its_part_made_anew(text, half, source):
    part = done_parts(half)[0]
    record_file(half, part).write_text(text)
    assert finish(half, source) == {part}


def test_record_of_fewer_arrays_has_its_part_made_anew(half, source):
    part = done_parts(half)[0]
    path = record_file(half, part)
    record = json.loads(path.read_text())
    del record[max(record)]
    path.write_text(json.dumps(record))
    assert finish(half, source) == {part}


def test_read_that_fails_leaves_nothing_marked_done(source, tmp_path, monkeypatch):
    preadv, calls, out = os.preadv, [], tmp_path / "converted"

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) > 120:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError, match=r"model-0000\d-of-000004\.safetensors: reading bytes \d+ to \d+ failed"):
        convert(source, out)
    monkeypatch.undo()
    done = done_parts(out)
    assert 0 < len(done) < 5
    assert sorted(path.stem for path in (out / "params").glob("*.json")) == sorted(done)
    with pytest.raises(CheckpointError, match=f"not a finished conversion: {len(done)} of 5 parts"):
        kj.load_model(out)
    convert(source, out)
    assert_whole(out, source, tmp_path / "back")


FULL_DISK = """
import resource, signal, sys
from kimi_jax.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(["convert", *sys.argv[2:]]))
"""


def test_disk_that_gets_full(begun, source, tmp_path):
    sizes = {
        part: max(p.stat().st_size for p in part_folder(begun, part).glob("*/c/**/*")) for part in done_parts(begun)
    }
    out, limit = tmp_path / "converted", min(sizes.values()) - 1
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(limit), str(source), str(out)],
        env=os.environ | {"PYTHONPATH": str(Path(kj.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert f"kimi-jax: {out}" in run.stderr
    assert "writing failed" in run.stderr
    assert "File too large" in run.stderr
    failed = [part for part in read_manifest(out).parts if f"/{part}: writing failed" in run.stderr]
    assert len(failed) == 1
    assert failed[0] not in done_parts(out)
    with pytest.raises(CheckpointError, match="not a finished conversion"):
        kj.load_model(out)
    convert(source, out)
    assert_whole(out, source, tmp_path / "back")


def test_second_process_of_the_same_number_is_refused(source, tmp_path):
    def again(what, done, total):
        with pytest.raises(CheckpointError, match="another process 0 of 5 is converting into it"):
            convert(source, tmp_path / "converted", process_count=5)

    convert(source, tmp_path / "converted", process_count=5, progress=again)


def test_killed_at_twenty_moments(source, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kimi_jax.checkpoint.convert"])
    moments, kills, finished, out = random.Random(0), 0, 0, tmp_path / "0"
    while kills < KILLS:
        process = context.Process(target=convert, args=(source, out))
        process.start()
        process.join(moments.uniform(0.1, 1.5))
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode != 0
        if (out / "manifest.json").exists() and read_manifest(out).complete:
            verify(out, source)
            finished += 1
            out = tmp_path / str(finished)
        else:
            assert process.exitcode != 0
            with pytest.raises((CheckpointError, ConfigError)):  # nothing there yet, or not finished
                kj.load_model(out)
    convert(source, out)
    assert_whole(out, source, tmp_path / "back")
