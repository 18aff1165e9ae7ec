"""Float experts to MXFP4: what is exact, what is rounded how, and what is refused."""

import json
import math
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.quantize import quantize_checkpoint
from kimi_jax.checkpoint.safetensors_file import CheckpointFiles
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.config import ConfigError

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w2"
SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate([SIZES, -SIZES])


def unpacked(packed, scale):
    """The numbers of packed bytes and scales in float64, by the format's definition."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return VALUES[codes] * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=-1)


def dequantized(tensors, dtype=ml_dtypes.bfloat16):
    """A change for `edited`: packed experts become float ones."""
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        base = name.removesuffix("_packed")
        packed, scale = tensors.pop(name), tensors.pop(f"{base}_scale")
        tensors[base] = packed.of(unpacked(packed.array, scale.array).astype(dtype))


def without_quantization(raw):
    del raw["text_config"]["quantization_config"]


@pytest.fixture
def floats(edited):
    """`floats(change)`: tiny-k3 with bfloat16 experts, further edited."""

    def make(change=lambda tensors: None):
        return edited("tiny-k3", lambda tensors: (dequantized(tensors), change(tensors)), without_quantization)

    return make


def test_numbers_that_mxfp4_can_hold_come_back(floats, tiny, stored, tmp_path):
    directory, out = floats(), tmp_path / "out"
    told = []
    errors = quantize_checkpoint(directory, out, progress=lambda *what: told.append(what))
    assert errors == dict.fromkeys(range(1, 9), 0.0)
    found, published = stored(out), stored(tiny.directory("tiny-k3"))
    assert found.keys() == published.keys()
    for name, tensor in published.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        if name.endswith(".weight_packed"):
            scale = name.replace("_packed", "_scale")
            ours, theirs = (unpacked(t[name].array, t[scale].array) for t in (found, published))
            np.testing.assert_array_equal(ours, theirs)
            np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs))
        elif not name.endswith(".weight_scale"):
            assert found[name].data == tensor.data
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (tiny.directory("tiny-k3") / "config.json").read_text()
    )
    total = sum(len(tensor.data) for tensor in found.values())
    assert told[-1] == ("model-00003-of-000003.safetensors", total, total)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    assert (out / "continuation.json").read_bytes() == (directory / "continuation.json").read_bytes()
    assert kj.load_model(out).config.moe.packed


def test_files_keep_their_names_and_larger_elements_come_first(floats, tmp_path):
    directory = floats()
    quantize_checkpoint(directory, tmp_path / "out")
    files = CheckpointFiles(tmp_path / "out")
    assert list(files.files) == list(CheckpointFiles(directory).files)
    for file in files.files.values():
        tensors = sorted(file.tensors.values(), key=lambda t: t.start)
        sizes = [files.numpy_dtype(tensor.name).itemsize for tensor in tensors]
        assert sizes == sorted(sizes, reverse=True)
        assert all(tensor.start % files.numpy_dtype(tensor.name).itemsize == 0 for tensor in tensors)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_block_by_hand(dtype, floats, stored, tmp_path):
    """One row of 64: scale 2^-3 with a tie, a cut and a minus zero, then a block of zeros."""
    row = np.zeros(64)
    row[:8] = np.array([6.5, 2.5, -3.5, 0.75, -0.25, -0.0, 5.0, 0.8]) / 8

    def change(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].of(tensors[name].array.astype(dtype))
        weight = tensors[f"{EXPERT}.weight"].array.copy()
        weight[5] = row
        tensors[f"{EXPERT}.weight"] = tensors[f"{EXPERT}.weight"].of(weight)

    errors = quantize_checkpoint(floats(change), tmp_path / "out")
    found = stored(tmp_path / "out")
    packed, scale = (found[f"{EXPERT}.{kind}"].array for kind in ("weight_packed", "weight_scale"))
    # Codes, low half first: 6, 2 · −4, 1 · −0, −0 · 4, 1 (0.75 and 5 are ties).
    assert list(packed[5]) == [0x47, 0x2E, 0x88, 0x26] + 28 * [0]
    assert list(scale[5]) == [124, 127]
    lost = np.array([0.5, 0.5, 0.5, 0.25, 0.25, 0, 1, 0.2]) / 8
    lost[7] = abs(float(np.asarray(row[7], dtype)) - 1 / 8)
    whole = [
        unpacked(found[name].array, found[name.replace("packed", "scale")].array)
        for name in found
        if ".layers.1." in name and name.endswith("packed")
    ]
    size = sum(np.sum(w**2) for w in whole) - np.sum(unpacked(packed, scale)[5] ** 2) + np.sum(row.astype(dtype) ** 2.0)
    assert errors[1] == pytest.approx(math.sqrt(np.sum(lost**2) / size), rel=1e-6)
    assert errors[2] == 0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_not_finite_are_refused_by_name(bad, floats, tmp_path):
    def change(tensors):
        weight = tensors[f"{EXPERT}.weight"].array.copy()
        weight[7, 33] = bad
        tensors[f"{EXPERT}.weight"] = tensors[f"{EXPERT}.weight"].of(weight)

    directory, out = floats(change), tmp_path / "out"
    with pytest.raises(CheckpointError) as caught:
        quantize_checkpoint(directory, out)
    assert re.search(
        rf"tensor {re.escape(EXPERT)}\.weight in {directory}/model-0000.*: {bad} at \[7, 33\]", str(caught.value)
    )
    assert list(out.iterdir()) == []


def test_widths_that_are_no_multiple_of_32_are_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"'moe_intermediate_size': MXFP4 experts need a multiple of 32, found 48"):
        quantize_checkpoint(tiny.directory("tiny-kimi-linear"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_packed_experts_are_refused(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="the experts are MXFP4 already"):
        quantize_checkpoint(tiny.directory("tiny-k3"), tmp_path / "out")


def test_a_folder_with_something_in_it_is_left_alone(floats, tmp_path):
    out: Path = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=f"{out} is not empty; choose another directory"):
        quantize_checkpoint(floats(), out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
