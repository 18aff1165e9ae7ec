"""Verifying and exporting a converted checkpoint: the first difference is found and named."""

import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.export import export
from kimi_jax.checkpoint.manifest import part_folder, read_manifest, write_manifest
from kimi_jax.checkpoint.safetensors_file import CheckpointFiles
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.checkpoint.synthesize import synthesize
from kimi_jax.checkpoint.verify import verify

pytestmark = pytest.mark.xdist_group("verify")
THREE_LAYERS = Path(__file__).parent / "three-layers.json"
BF16 = ml_dtypes.bfloat16
LAYER = "language_model.model.layers.1."
PACKED = "block_sparse_moe.experts.3.w2.weight_packed"
SCALES = "block_sparse_moe.experts.3.w2.weight_scale"
MATRIX = "self_attn.o_proj.weight"
VISION = "vision_tower.encoder.blocks.1.mlp.fc0.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of three layers in four files, with a vision tower."""
    out = tmp_path_factory.mktemp("source") / "checkpoint"
    synthesize(THREE_LAYERS, out, file_bytes=300_000)
    return out


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """The converted `source`; not to be changed."""
    out = tmp_path_factory.mktemp("converted") / "checkpoint"
    convert(source, out)
    return out


@pytest.fixture
def flipped(source, converted, tmp_path):
    """`flipped(part, name)`: a copy of the converted checkpoint, one bit of that tensor's data another."""

    def flip(part, name):
        data = CheckpointFiles(source).read(name)
        piece = np.ascontiguousarray(data[:, :16] if name.endswith(MATRIX) else data).tobytes()  # a chunk
        out = shutil.copytree(converted, tmp_path / "flipped")
        (path,) = [
            path for path in part_folder(out, part).glob("*/c/**/*") if path.is_file() and piece in path.read_bytes()
        ]
        raw = bytearray(path.read_bytes())
        raw[raw.index(piece) + len(piece) // 2] ^= 4
        path.write_bytes(raw)
        return out

    return flip


@pytest.fixture
def altered(source, tmp_path):
    """`altered(name, element, value)`: a copy of `source` with one element another; also gives the old value."""

    def alter(name, element, value):
        out = shutil.copytree(source, tmp_path / "altered")
        files = CheckpointFiles(out)
        data, tensor = files.read(name), files.tensors[name]
        old, data[element] = data[element], value
        with Path(tensor.path).open("r+b") as file:
            file.seek(tensor.start)
            file.write(data.tobytes())
        return out, old

    return alter


def test_whole_checkpoint_verifies(source, converted):
    seen = []
    count = verify(converted, progress=lambda *report: seen.append(report))
    assert count == verify(converted, source)
    experts = [name for name in CheckpointFiles(source).tensors if ".experts." in name]
    assert count == len(CheckpointFiles(source).tensors) - len(experts) + len(experts) // 4
    padding = 2 * 12 * 4  # of A_log in the two KDA layers
    total = sum(tensor.end - tensor.start for tensor in CheckpointFiles(source).tensors.values()) - padding
    assert seen[-1][1:] == (total, total)


@pytest.mark.parametrize(
    ("part", "name", "told"),
    [
        ("layers.1", f"{LAYER}{PACKED}", f"tensor model.layers.1.{PACKED}: damaged"),
        ("layers.1", f"{LAYER}{MATRIX}", f"tensor model.layers.1.{MATRIX}, rows 0 to 128: damaged"),
        ("unused", VISION, f"tensor {VISION}, rows 0 to 2048: damaged"),
    ],
)
def test_flipped_bit_is_found_without_the_source(part, name, told, flipped, source, tmp_path):
    out = flipped(part, name)
    with pytest.raises(CheckpointError, match=re.escape(told)):
        verify(out)
    with pytest.raises(CheckpointError, match=re.escape(told)):
        verify(out, source)
    with pytest.raises(CheckpointError, match="cannot be read"):
        export(out, tmp_path / "back")
    assert list((tmp_path / "back").glob("*.json")) == []


def test_missing_data_is_found(converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "copy")
    shutil.rmtree(next(part_folder(out, "layers.2").glob("*/c")))
    with pytest.raises(CheckpointError, match=r"layers\.2: array layers\.2\.\S+ cannot be read"):
        verify(out)


def test_other_element_of_an_expert(altered, converted):
    place, value = altered(f"{LAYER}{PACKED}", (5, 7), 0)
    assert value != 0
    told = f"tensor model.layers.1.{PACKED}: element [3, 5, 7] is {value}, its source has 0"
    with pytest.raises(CheckpointError, match=re.escape(told)):
        verify(converted, place)


def test_other_element_of_an_expert_that_shares_its_chunk(altered, converted):
    place, value = altered(f"{LAYER}{SCALES}", (9, 1), 200)
    array = f"layers.1.{SCALES.replace('.3.', '.')}"
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {array}: element [3, 9, 1] is {value}, its source")):
        verify(converted, place)


def test_other_element_of_a_matrix_beyond_its_first_band(altered, converted):
    name = "language_model.model.embed_tokens.weight"
    place, value = altered(name, (301, 2), BF16(2.5))
    told = f"tensor model.embed_tokens.weight: element [301, 2] is {value}, its source has 2.5"
    with pytest.raises(CheckpointError, match=re.escape(told)):
        verify(converted, place)


def test_nan_is_compared_by_its_bits(altered, converted):
    name = f"{LAYER}input_layernorm.weight"
    place, value = altered(name, (5,), BF16("nan"))
    with pytest.raises(CheckpointError, match=re.escape(f"element [5] is {value}, its source has nan")):
        verify(converted, place)


def test_against_a_checkpoint_of_other_tensors(converted, tiny, tmp_path):
    with pytest.raises(CheckpointError, match=r"array \S+ is only in"):
        verify(converted, tiny.directory("tiny-k3"))


def test_unfinished_conversion_is_neither_verified_nor_exported(converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "copy")
    manifest = read_manifest(out)
    write_manifest(out, replace(manifest, complete=False))
    with pytest.raises(CheckpointError, match="not a finished conversion"):
        verify(out)
    with pytest.raises(CheckpointError, match="not a finished conversion"):
        export(out, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_export_into_a_folder_that_is_not_empty(converted, source, tmp_path):
    out = tmp_path / "back"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty; choose another folder, or give overwrite"):
        export(converted, out)
    assert (out / "config.json").read_text() == "{}"
    seen = []
    assert export(converted, out, overwrite=True, progress=lambda *report: seen.append(report)) == 4
    found = {path.name: path.read_bytes() for path in out.iterdir()}
    assert found == {path.name: path.read_bytes() for path in source.iterdir()} | {"mine.txt": b"mine"}
    total = sum(tensor.end - tensor.start for tensor in CheckpointFiles(source).tensors.values())
    assert seen[-1] == ("model-00004-of-000004.safetensors", total, total)


def test_export_needs_room(converted, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 1000))
    with pytest.raises(CheckpointError, match=r"bytes are needed, the disk has 1,000 left"):
        export(converted, tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []


@pytest.mark.parametrize("change", ["missing", "changed"])
@pytest.mark.parametrize("kind", ["header", "small file"])
def test_small_files_and_headers_are_proved_too(kind, change, converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "copy")
    path = (
        next((out / "source").glob("*.header")) if kind == "header" else out / "source" / "model.safetensors.index.json"
    )
    path.unlink() if change == "missing" else path.write_bytes(path.read_bytes() + b" ")
    told = f"{path} is {'missing' if change == 'missing' else 'not as it came'}: put it back"
    for action in (verify, lambda out: export(out, tmp_path / "back")):
        with pytest.raises(CheckpointError, match=re.escape(told)):
            action(out)


def test_damage_is_an_error_on_loading(flipped):
    out = flipped("layers.1", f"{LAYER}{PACKED}")
    with pytest.raises(CheckpointError, match=r"experts\.w2\.weight_packed cannot be read"):
        kj.load_model(out)
