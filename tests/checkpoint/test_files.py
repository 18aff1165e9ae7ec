"""The files of a checkpoint directory against its index, in both directions, before anything is placed."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.config import ConfigError
from kimi_jax.model.model import flatten

FIRST, SECOND = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "language_model.model.norm.weight"  # in the second file
EMBED = "language_model.model.embed_tokens.weight"  # in the first


def edit_index(directory: Path, change) -> None:
    raw = json.loads((directory / INDEX).read_text())
    change(raw["weight_map"])
    (directory / INDEX).write_text(json.dumps(raw))


def check_same(model: kj.Model, wanted: kj.Model) -> None:
    expected = dict(flatten(wanted.params))
    found = dict(flatten(model.params))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], strict=True)
    assert model.config == wanted.config


def test_missing_shard(checkpoint, refused):
    directory = checkpoint("tiny-k3")
    (directory / "model-00002-of-000003.safetensors").unlink()
    text = refused(directory, "1 of 3 files are missing", "model-00002-of-000003", "still downloading")
    assert "model-00001" not in text
    (directory / "model-00003-of-000003.safetensors").unlink()
    refused(directory, "2 of 3 files", "model-00002-of-000003.safetensors, model-00003-of-000003.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [(lambda raw: raw[:-3], "truncated: tensor"), (lambda raw: raw + b"\0\0", "2 bytes too long")],
    ids=["cut", "appended"],
)
@pytest.mark.parametrize("file", [FIRST, SECOND])
def test_shard_of_the_wrong_size(checkpoint, refused, damage, words, file):
    directory = checkpoint("tiny-k31")
    path = directory / file
    path.write_bytes(damage(path.read_bytes()))
    refused(directory, str(path), words, "download the file again")


def test_tensor_of_the_index_is_not_in_its_file(checkpoint, rewrite, refused):
    directory = checkpoint("tiny-k31")
    rewrite(directory / SECOND, lambda tensors: tensors.pop(NORM))
    refused(directory, f"tensor {NORM} is missing", f"the index places it in {directory / SECOND}")


def test_index_places_a_tensor_in_the_other_file(checkpoint, refused):
    directory = checkpoint("tiny-k31")
    edit_index(directory, lambda places: places.update({NORM: FIRST}))
    refused(directory, f"tensor {NORM} is missing", f"the index places it in {directory / FIRST}")


def test_tensor_of_a_file_is_not_in_the_index(checkpoint, refused):
    directory = checkpoint("tiny-k31")
    edit_index(directory, lambda places: places.pop(NORM))
    refused(directory, f"extra tensor {NORM} in {directory / SECOND}: the index does not list it")
    edit_index(directory, lambda places: places.pop(EMBED))
    refused(directory, f"{directory / FIRST}: the index does not list it, nor 1 others")


@pytest.mark.parametrize("value", ["same", "other"])
@pytest.mark.parametrize("file", ["a.safetensors", "z.safetensors"])
def test_tensor_in_two_files(checkpoint, rewrite, refused, value, file):
    directory = checkpoint("tiny-k31")
    (directory / SECOND).rename(directory / file)
    edit_index(directory, lambda places: places.update({n: file for n, f in places.items() if f == SECOND}))
    norm = {}
    rewrite(directory / file, lambda tensors: norm.update({NORM: tensors[NORM]}))
    if value == "other":
        norm[NORM] = norm[NORM]._replace(data=bytes(len(norm[NORM].data)))
    rewrite(directory / FIRST, lambda tensors: tensors.update(norm))
    refused(directory, f"tensor {NORM} is in two files", str(directory / FIRST), str(directory / file))


@pytest.mark.parametrize(
    "place", [f"../{SECOND}", f"a/{SECOND}", "/abs.safetensors", "..", ".", "", "a\\b.safetensors", 5, None]
)
def test_index_may_only_name_files_beside_it(checkpoint, refused, place):
    directory = checkpoint("tiny-k31")
    for target in (directory.parent, directory / "a"):
        target.mkdir(exist_ok=True)
        shutil.copy(directory / SECOND, target / SECOND)  # what a loader that follows the path would find
    edit_index(directory, lambda places: places.update({NORM: place}))
    refused(directory, str(directory / INDEX), f"tensor {NORM} is placed in {place!r}", "the same directory")


@pytest.mark.parametrize(
    "text", ["", "[]", "5", "null", "{}", '{"weight_map": []}', '{"weight_map": null}', "{'weight_map': {}}", "\x00"]
)
def test_not_an_index(checkpoint, refused, text):
    directory = checkpoint("tiny-k31")
    (directory / INDEX).write_text(text)
    refused(directory, f"{directory / INDEX}: not a safetensors index")


def test_name_twice_in_the_index(checkpoint, refused):
    directory = checkpoint("tiny-k31")
    text = (directory / INDEX).read_text()
    (directory / INDEX).write_text(text.replace(f'"{NORM}"', f'"{NORM}": "{FIRST}", "{NORM}"'))
    refused(directory, str(directory / INDEX), f"{NORM} is listed twice")


def test_file_that_the_index_does_not_name(checkpoint, refused):
    directory = checkpoint("tiny-k31")
    shutil.copy(directory / FIRST, directory / "adapter.safetensors")
    refused(directory, f"{directory}: the index does not name adapter.safetensors")


def test_empty_index(checkpoint, refused):
    directory = checkpoint("tiny-k31")
    (directory / INDEX).write_text('{"weight_map": {}}')
    refused(directory, INDEX)


def test_symbolic_links_are_followed(checkpoint, refused, tiny, tmp_path):
    # as the Hugging Face cache keeps files: blobs named by their digest, links to them under a snapshot
    directory, blobs, snapshot = checkpoint("tiny-k31"), tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(directory.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    check_same(kj.load_model(snapshot, dtype="float32"), tiny("tiny-k31"))
    (snapshot / SECOND).resolve().unlink()
    refused(snapshot, "1 of 2 files are missing", SECOND)


def test_one_file_without_an_index(edited, stored, tiny, rewrite):
    directory = edited("tiny-k31")
    tensors = stored(directory)
    (directory / INDEX).unlink()
    (directory / SECOND).unlink()
    (directory / FIRST).rename(directory / "model.safetensors")
    rewrite(directory / "model.safetensors", lambda held: held.update(tensors))
    check_same(kj.load_model(directory, dtype="float32"), tiny("tiny-k31"))


def test_files_without_an_index(checkpoint, tiny, refused):
    directory = checkpoint("tiny-k31")
    (directory / INDEX).unlink()
    check_same(kj.load_model(directory, dtype="float32"), tiny("tiny-k31"))
    shutil.copy(directory / FIRST, directory / "copy.safetensors")
    refused(directory, "is in two files", str(directory / FIRST), str(directory / "copy.safetensors"))


class Payload:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(checkpoint, tiny, refused, tmp_path):
    directory, trace = checkpoint("tiny-k31"), tmp_path / "trace"
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(trace)))
    check_same(kj.load_model(directory, dtype="float32"), tiny("tiny-k31"))
    for path in [directory / INDEX, *directory.glob("*.safetensors")]:
        path.unlink()
    refused(directory, f"{directory} holds no safetensors files")
    # An index that names the pickled file does not make it one that is read as such.
    (directory / INDEX).write_text(json.dumps({"weight_map": {NORM: "pytorch_model.bin"}}))
    refused(directory, str(directory / "pytorch_model.bin"), "not a safetensors file")
    assert not trace.exists()
    pickle.loads((directory / "pytorch_model.bin").read_bytes())
    assert trace.exists()


def test_directory_without_weights_without_config_or_no_directory(checkpoint, refused, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, f"{empty / 'config.json'} does not exist", error=ConfigError)
    directory = checkpoint("tiny-k31")
    refused(directory / FIRST, f"{directory / FIRST} is not a directory")
    refused(tmp_path / "nowhere", f"{tmp_path / 'nowhere'} is not a directory")
    shutil.copy(directory / "config.json", empty)
    refused(empty, f"{empty} holds no safetensors files")
