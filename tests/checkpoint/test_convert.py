"""Converting: the way there and back is the identity, alone or by several processes, and what is refused."""

import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.convert import WRITER_FACTOR, convert
from kimi_jax.checkpoint.export import export
from kimi_jax.checkpoint.manifest import enter_parts, read_manifest
from kimi_jax.checkpoint.safetensors_file import CheckpointFiles
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.checkpoint.synthesize import synthesize
from kimi_jax.checkpoint.verify import verify
from kimi_jax.config import ConfigError

pytestmark = pytest.mark.xdist_group("convert")
THREE_LAYERS = Path(__file__).parent / "three-layers.json"  # one expert a device at least, and a vision tower
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w2"


def content(directory):
    """Bytes of every file of a folder by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of three layers in four files, with a vision tower and a file that is not ours to know."""
    out = tmp_path_factory.mktemp("source") / "checkpoint"
    assert synthesize(THREE_LAYERS, out, file_bytes=300_000) == 4
    (out / "tokenizer.bin").write_bytes(bytes(range(256)))
    (out / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    return out


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """The converted `source`; not to be changed."""
    out = tmp_path_factory.mktemp("converted") / "checkpoint"
    assert convert(source, out).complete
    return out


@pytest.fixture
def copy(source, tmp_path):
    """A copy of `source`, to be damaged."""
    return shutil.copytree(source, tmp_path / "copy")


def damage(directory, name, offset, data):
    """Writes bytes into a stored tensor."""
    tensor = CheckpointFiles(directory).tensors[name]
    with Path(tensor.path).open("r+b") as file:
        file.seek(tensor.start + offset)
        file.write(data)
    return Path(tensor.path).name


def test_vision_tower_and_small_files_come_back(source, converted, tmp_path):
    parts = [f"layers.{i}" for i in range(3)] + ["rest", "unused"]
    assert sorted(read_manifest(converted).parts) == parts
    assert export(converted, tmp_path / "back") == 4
    assert content(tmp_path / "back") == content(source)
    assert kj.load_model(converted).vision_tensors == kj.load_model(source).vision_tensors == 18
    assert kj.load_model(converted).stop_ids == kj.load_model(source).stop_ids == (7, 9, 510)


def test_shapes_beside_packed_weights_come_back(edited, tmp_path):
    def add_shapes(tensors):
        packed = [name for name in tensors if name.endswith("experts.2.w1.weight_packed")]
        assert len(packed) == 5
        for i, name in enumerate(packed):
            kind, dtype = (("I64", np.int64), ("I32", np.int32))[i % 2]
            raw = np.array([64, 64], dtype).tobytes()
            tensors[name.replace("_packed", "_shape")] = type(tensors[name])(kind, (2,), raw)

    place = edited("tiny-k31", add_shapes)
    (place / "golden.npz").unlink()
    convert(place, tmp_path / "converted")
    export(tmp_path / "converted", tmp_path / "back")
    assert content(tmp_path / "back") == content(place)


def test_conversion_says_nothing(source, tmp_path, caplog, capfd):
    with caplog.at_level(logging.WARNING):
        convert(source, tmp_path / "converted", process_count=5)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_progress_counts_every_byte(source, tmp_path):
    seen = []
    convert(source, tmp_path / "converted", process_count=2, progress=lambda *report: seen.append(report))
    total = seen[0][2]
    assert {report[2] for report in seen} == {total}
    counts = [done for _, done, _ in seen]
    assert counts == sorted(counts)
    assert counts[-1] == total
    done = [part for part, digest in read_manifest(tmp_path / "converted").parts.items() if digest]
    assert list(dict.fromkeys(what for what, *_ in seen)) == [f"writing {part}" for part in done]
    assert len(done) == 3


@pytest.fixture(scope="module")
def thirteen(tmp_path_factory):
    """A checkpoint of thirteen layers."""
    place = tmp_path_factory.mktemp("thirteen")
    raw = json.loads(THREE_LAYERS.read_text())
    del raw["vision_config"]
    kinds = {"full_attn_layers": [4, 8, 12, 13], "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11]}
    raw["text_config"]["num_hidden_layers"] = 13
    raw["text_config"]["linear_attn_config"].update(kinds)
    (place / "config.json").write_text(json.dumps(raw))
    synthesize(place / "config.json", place / "checkpoint", file_bytes=600_000)
    return place / "checkpoint"


def assert_refused_as_unfinished(directory):
    manifest = read_manifest(directory)
    assert not manifest.complete
    with pytest.raises(CheckpointError, match=rf"not a finished conversion: {manifest.done} of 14 .* to resume it"):
        kj.load_model(directory)


def test_two_processes_convert_together(thirteen, tmp_path):
    command = [sys.executable, "-m", "kimi_jax.cli.main", "convert", str(thirteen), str(tmp_path / "converted")]
    environment = os.environ | {"PYTHONPATH": str(Path(kj.__file__).parents[1])}
    processes = [
        subprocess.Popen(
            [*command, "--process-index", str(i), "--process-count", "2"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert any("complete, 14 parts" in text for text in printed)
    assert read_manifest(tmp_path / "converted").complete
    export(tmp_path / "converted", tmp_path / "back")
    assert content(tmp_path / "back") == content(thirteen)


def test_four_processes_convert_in_any_order(thirteen, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kimi_jax.checkpoint.convert"])
    out, done = tmp_path / "converted", 0
    for indices in ((3, 1), (2, 0)):
        if done:
            assert_refused_as_unfinished(out)
        processes = [
            context.Process(target=convert, args=(thirteen, out), kwargs={"process_index": i, "process_count": 4})
            for i in indices
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        done += len(range(indices[0], 14, 4)) + len(range(indices[1], 14, 4))
        assert read_manifest(out).done == done
    export(out, tmp_path / "back")
    assert content(tmp_path / "back") == content(thirteen)


def test_finished_destination_is_left_alone(source, converted, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in converted.rglob("*") if not path.name.startswith(".")}
    assert convert(source, converted).complete
    assert {path: path.stat().st_mtime_ns for path in before} == before
    synthesize(THREE_LAYERS, tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match=r"was finished from another source .* give overwrite to replace it"):
        convert(tmp_path / "other", converted)


def test_overwrite_mends_what_is_damaged(source, converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "converted")
    part = out / "params" / "layers.1"
    whole = (out / "params" / "layers.2.json").stat().st_ino
    shutil.rmtree(next(part.glob("*/c")))
    assert convert(source, out, overwrite=True).complete
    assert (out / "params" / "layers.2.json").stat().st_ino == whole
    verify(out, source)


def test_the_same_layout_with_other_weights_is_another_source(source, tmp_path):
    """A fine-tune has the headers of its base."""
    convert(source, tmp_path / "converted", process_count=2)
    other = shutil.copytree(source, tmp_path / "other")
    file = next(other.glob("*.safetensors"))
    data = np.frombuffer(file.read_bytes(), np.uint8).copy()
    data[-4000:] ^= 1
    file.write_bytes(data.tobytes())
    with pytest.raises(CheckpointError, match="was begun from another source"):
        convert(other, tmp_path / "converted")


def test_a_process_answers_for_its_own_parts_only(source, tmp_path):
    """A damaged part of process 0 that is made anew: until then the conversion is not complete."""
    out = tmp_path / "converted"
    convert(source, out, process_index=0, process_count=2)
    part = next(part for part, digest in read_manifest(out).parts.items() if digest)
    shutil.rmtree(next((out / "params" / part).glob("*/c")))
    enter_parts(out, {part: False})  # as a process 0 that is started again does first
    assert not convert(source, out, process_index=1, process_count=2).complete
    assert convert(source, out, process_index=0, process_count=2).complete
    verify(out, source)


def test_the_source_itself_is_refused(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "copy")
    before = content(copy)
    with pytest.raises(CheckpointError, match="is the source itself"):
        convert(copy, copy)
    assert content(copy) == before


@pytest.mark.parametrize("name", ["gs://bucket/x", "s3:/bucket/x"])
def test_destination_by_url_is_refused(source, name):
    with pytest.raises(ValueError, match="is a URL; give a path"):
        convert(source, name)


def test_overwrite_that_was_stopped_goes_on_with_the_new_source(source, converted, tmp_path, monkeypatch):
    other = tmp_path / "other"
    synthesize(THREE_LAYERS, other, seed=1)
    out = shutil.copytree(converted, tmp_path / "converted")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kimi_jax.checkpoint.convert.write_durably", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(other, out, overwrite=True)
    monkeypatch.undo()
    with pytest.raises((CheckpointError, ConfigError)):
        kj.load_model(out)
    assert convert(other, out).complete
    verify(out, other)
    export(out, tmp_path / "back")
    assert content(tmp_path / "back") == content(other)  # no file of the first checkpoint is left


def test_foreign_directory_is_refused(source, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not empty .* and holds no conversion"):
        convert(source, tmp_path)
    with pytest.raises(CheckpointError, match=r"is not empty .* and holds no conversion"):
        convert(source, tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]  # nothing was touched


def test_folder_with_a_source_of_its_own_is_refused(source, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.json").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not empty .* and holds no conversion"):
        convert(source, tmp_path)
    assert (tmp_path / "source" / "a.json").read_text() == "mine"


def test_unfinished_conversion_of_another_source_is_refused(source, tmp_path):
    convert(source, tmp_path / "converted", process_count=5)
    synthesize(THREE_LAYERS, tmp_path / "other", file_bytes=500_000)
    with pytest.raises(CheckpointError, match="was begun from another source"):
        convert(tmp_path / "other", tmp_path / "converted")


def test_memory_too_small_names_array_and_bytes(source, tmp_path):
    least = WRITER_FACTOR * 128 * 192 * 2  # a matrix that is split by columns is written whole
    with pytest.raises(
        CheckpointError,
        match=rf"array layers\.0\.mlp\.down_proj\.weight is .* takes {WRITER_FACTOR} times as much: {least:,}",
    ):
        convert(source, tmp_path / "converted", max_memory=least - 1)
    assert not (tmp_path / "converted").exists()
    assert convert(source, tmp_path / "converted", max_memory=least, process_count=5).done == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"process_index": 2, "process_count": 2}, "process_index 2 must be from 0 to process_count - 1 = 1"),
        ({"process_index": -1}, "process_index -1 must be from 0"),
        ({"process_count": 2, "overwrite": True}, "overwrite is for one process"),
    ],
)
def test_wrong_use(arguments, message, source, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "converted", **arguments)
    assert not (tmp_path / "converted").exists()


def test_full_disk_is_told_before_writing(source, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 1000))
    with pytest.raises(CheckpointError, match=r"bytes are needed, the disk has 1,000 left: free [\d,]+ more"):
        convert(source, tmp_path / "converted")
    assert list((tmp_path / "converted" / "params").iterdir()) == []


def test_source_that_is_still_downloading(copy, tmp_path):
    (copy / "model-00002-of-000004.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of 4 files are missing, perhaps still downloading: model-00002"):
        convert(copy, tmp_path / "converted")


def test_scale_that_is_nan(copy, tmp_path):
    file = damage(copy, f"{EXPERT}.weight_scale", 5, b"\xff")
    with pytest.raises(CheckpointError, match=rf"tensor {EXPERT}\.weight_scale in .*{file}: a scale byte is 255"):
        convert(copy, tmp_path / "converted")
    assert read_manifest(tmp_path / "converted").parts["layers.1"] is None


def test_padding_that_is_not_zero(copy, tmp_path):
    name = "language_model.model.layers.1.self_attn.A_log"
    file = damage(copy, name, 4 * 5, np.float32(0.5).tobytes())
    message = rf"tensor {name} in .*{file}: 4 numbers are one a head, the 12 behind .* found 0\.5"
    with pytest.raises(CheckpointError, match=message):
        convert(copy, tmp_path / "converted")
    assert read_manifest(tmp_path / "converted").parts["layers.1"] is None
