"""Models from converted checkpoints: the same arrays, in the same places, as from the Hugging Face files."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.export import export
from kimi_jax.checkpoint.manifest import read_manifest, record_file
from kimi_jax.checkpoint.synthesize import synthesize
from kimi_jax.model.model import flatten

THREE_LAYERS = Path(__file__).parent / "three-layers.json"
SMALL = pytest.mark.xdist_group("restore")
K3_MESHES = {"one": None, "data8": {"data": 8}, "data2-tensor4": {"data": 2, "tensor": 4}}
K3_MESHES["data4-tensor2"] = {"data": 4, "tensor": 2}


@pytest.fixture(scope="session")
def converted(tiny, tmp_path_factory):
    """`converted(name)`: a tiny checkpoint, converted once a process; not to be changed."""

    @cache
    def make(name):
        out = tmp_path_factory.mktemp("converted") / name
        convert(tiny.directory(name), out)
        return out

    return make


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of three layers."""
    out = tmp_path_factory.mktemp("source") / "checkpoint"
    synthesize(THREE_LAYERS, out)
    return out


@pytest.fixture(scope="module")
def small(source, tmp_path_factory):
    """The converted `source`; not to be changed."""
    out = tmp_path_factory.mktemp("small") / "checkpoint"
    convert(source, out)
    return out


@pytest.fixture
def copy(small, tmp_path):
    """A copy of `small`, to be damaged."""
    return shutil.copytree(small, tmp_path / "copy")


def assert_same_params(got, want):
    found, params = dict(flatten(got.params)), dict(flatten(want.params))
    assert found.keys() == params.keys()
    for name, param in params.items():
        assert found[name].dtype == param.dtype, name
        assert found[name].sharding == param.sharding, name
        for one, other in zip(found[name].addressable_shards, param.addressable_shards, strict=True):
            assert one.device == other.device
            assert one.index == other.index
            assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes(), name


@pytest.mark.xdist_group("tiny-k3 one")
@pytest.mark.parametrize("mesh", K3_MESHES)
def test_k3_params_on_every_mesh(mesh, tiny, converted):
    grid = kj.make_mesh(K3_MESHES[mesh])
    got = kj.load_model(converted("tiny-k3"), mesh=grid)
    assert_same_params(got, kj.load_model(tiny.directory("tiny-k3"), mesh=grid))
    experts = got.params["layers"]["1"]["block_sparse_moe"]["experts"]["w1"]["weight_packed"]
    assert {shard.data.shape[0] for shard in experts.addressable_shards} == {16 if grid is None else 2}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tiny-k3", marks=pytest.mark.xdist_group("tiny-k3 one")),
        pytest.param("tiny-k31", marks=SMALL),
        pytest.param("tiny-kimi-linear", marks=SMALL),
    ],
)
def test_there_and_back_gives_the_same_files(name, tiny, converted, tmp_path):
    export(converted(name), tmp_path / "back")
    want = {path.name: path.read_bytes() for path in tiny.directory(name).iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == want


@SMALL
@pytest.mark.parametrize("name", ["tiny-k31", "tiny-kimi-linear"])
def test_params_of_the_other_models(name, tiny, converted):
    got = kj.load_model(converted(name), mesh=kj.make_mesh({"data": 2, "tensor": 2}), dtype="float32")
    assert_same_params(got, tiny(name, "data2-tensor2"))
    assert got.config == tiny(name, "data2-tensor2").config
    assert got.stop_ids == tiny(name, "data2-tensor2").stop_ids


@pytest.mark.xdist_group("tiny-k3 one")
def test_logits_are_equal_bit_for_bit(tiny, golden, converted):
    got = kj.load_model(converted("tiny-k3"), dtype="float32")
    tokens = np.zeros((8, 150), np.int32)
    tokens[:, : len(golden("tiny-k3")["seq_input_ids"])] = golden("tiny-k3")["seq_input_ids"]
    lengths = np.asarray([150, 3, 64, 101, 1, 17, 65, 119])
    want = np.asarray(kj.forward(tiny("tiny-k3"), tokens, lengths))
    assert np.isfinite(want[0]).all()
    assert np.asarray(kj.forward(got, tokens, lengths)).tobytes() == want.tobytes()


@SMALL
@pytest.mark.parametrize("form", ["source", "small"])
def test_chosen_layers_alone(form, request):
    directory = request.getfixturevalue(form)
    counted = []
    model = kj.load_model(directory, layers=[1], progress=lambda *counts: counted.append(counts))
    whole = kj.load_model(directory)
    wanted = 0
    for name, param in flatten(model.params):
        full = dict(flatten(whole.params))[name]
        if name.startswith(("layers.0.", "layers.2.")):
            assert isinstance(param, jax.ShapeDtypeStruct), name
            assert param.shape == full.shape
        else:
            assert np.asarray(param).tobytes() == np.asarray(full).tobytes(), name
            wanted += full.nbytes
    assert counted[-1] == (wanted, wanted)


@SMALL
@pytest.mark.parametrize("form", ["source", "small"])
@pytest.mark.parametrize("layer", [3, -1])
def test_layer_that_is_not_there(form, layer, request):
    with pytest.raises(ValueError, match=f"layers: {layer} is none of the model's, 0 to 2"):
        kj.load_model(request.getfixturevalue(form), layers=[0, layer])


def change_manifest(directory, **fields):
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_record(directory, part, change):
    """Edits a record and enters its new digest into the manifest."""
    path = record_file(directory, part)
    record = json.loads(path.read_text())
    change(record["arrays"])
    path.write_text(json.dumps(record))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    change_manifest(directory, parts=dict(read_manifest(directory).parts) | {part: digest})


@SMALL
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format_version": 2}, ("format version 2", "up to 1", "install a newer one")),
        ({"format_version": "1"}, ("format version '1'",)),
        ({"format": "other"}, ("format 'other', wanted 'kimi_jax checkpoint'",)),
        ({"parts": None}, ("not a manifest of a converted checkpoint",)),
        ({"complete": False}, ("not a finished conversion: 5 of 5 parts", "to resume it")),
    ],
)
def test_manifest_of_another_kind(fields, words, copy, refused):
    change_manifest(copy, **fields)
    refused(copy, str(copy), *words)


@SMALL
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\x00"])
def test_damaged_manifest(text, copy, refused):
    (copy / "manifest.json").write_text(text)
    refused(copy, str(copy / "manifest.json"), "not a manifest of a converted checkpoint")


@SMALL
def test_record_that_was_changed(copy, refused):
    path = record_file(copy, "layers.1")
    path.write_text(path.read_text().replace('"bfloat16"', '"float16"', 1))
    refused(copy, str(path), "its digest is not the one in", "manifest.json")
    path.unlink()
    refused(copy, str(path), "not a record of a part")


@SMALL
def test_configuration_that_was_changed(copy, refused):
    raw = json.loads((copy / "config.json").read_text())
    raw["text_config"]["rms_norm_eps"] = 1e-6
    (copy / "config.json").write_text(json.dumps(raw))
    refused(copy, str(copy / "config.json"), "is not the configuration in", "put it back")
    (copy / "config.json").unlink()
    refused(copy, str(copy / "config.json"), "is not the configuration in", "put it back")


NORM = "layers.1.input_layernorm.weight"


@SMALL
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record.pop(NORM), (f"missing array {NORM}", "convert the source again")),
        (
            lambda record: record.update({"layers.1.odd": record[NORM]}),
            ("extra array layers.1.odd", "no such parameter"),
        ),
        (lambda record: record[NORM].update(shape=[64]), (f"array {NORM}", "shape [64], wanted [128]")),
        (lambda record: record[NORM].update(dtype="int8"), (f"array {NORM}", "int8, wanted bfloat16 or float32")),
    ],
)
def test_record_of_other_arrays(change, words, copy, refused):
    change_record(copy, "layers.1", change)
    refused(copy, *words)


TWO_PROCESSES = """
import math, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
source, converted, address, process = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(process))
import numpy as np
import kimi_jax as kj
from kimi_jax.checkpoint.array_store import ArrayStore
from kimi_jax.checkpoint.source import HuggingFaceSource
from kimi_jax.model.model import flatten

read, counts = ArrayStore.read, {}

def counting(store, name, index):
    data = read(store, name, index)
    counts[name] = counts.get(name, 0) + data.nbytes
    return data

ArrayStore.read = counting
model = kj.load_model(converted, mesh=kj.make_mesh({"data": 2, "tensor": 4}))
original, shards = HuggingFaceSource(source), 0
for name, param in flatten(model.params):
    whole = original.read(name, tuple(slice(0, size) for size in param.shape))
    assert len(param.addressable_shards) == 4 and len(param.sharding.device_set) == 8
    for shard in param.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), whole[shard.index]), name
        shards += 1
    if ".experts." in name:
        assert counts[name] * 2 == whole.nbytes, (name, counts[name], whole.nbytes)
    else:
        assert counts[name] <= whole.nbytes, (name, counts[name], whole.nbytes)
print(f"process {jax.process_index()} of {jax.process_count()}: {shards} shards are right", flush=True)
"""


@pytest.mark.xdist_group("tiny-k3 one")
def test_two_processes_read_what_their_devices_hold(tiny, converted):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", TWO_PROCESSES, str(tiny.directory("tiny-k3")), str(converted("tiny-k3")), address]
    environment = os.environ | {"PYTHONPATH": str(Path(kj.__file__).parents[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(i)], env=environment, **pipes) for i in range(2)]
    try:
        for i, process in enumerate(processes):
            out, error = process.communicate(timeout=300)
            assert process.returncode == 0, error
            assert f"process {i} of 2: {4 * 282} shards are right" in out
    finally:
        for process in processes:
            process.kill()
