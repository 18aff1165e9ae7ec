"""Synthetic checkpoints: reproducible, in the real layout, and with activations that stay alive."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.safetensors_file import CheckpointFiles
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.checkpoint.synthesize import synthesize
from kimi_jax.config import ConfigError

THREE_LAYERS = Path(__file__).parent / "three-layers.json"


def content(directory):
    """Bytes of every file of a folder by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_seed_decides_every_byte(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        synthesize(THREE_LAYERS, tmp_path / name, seed=seed)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    one, other = CheckpointFiles(tmp_path / "a"), CheckpointFiles(tmp_path / "c")
    same = [name for name in one.tensors if one.read(name).tobytes() == other.read(name).tobytes()]
    assert same == []
    assert content(tmp_path / "a")["config.json"] == THREE_LAYERS.read_bytes()


def test_numbers_do_not_depend_on_how_files_are_cut(tmp_path):
    assert synthesize(THREE_LAYERS, tmp_path / "one") == 1
    count = synthesize(THREE_LAYERS, tmp_path / "many", file_bytes=150_000)
    assert count == 9
    one, many = CheckpointFiles(tmp_path / "one"), CheckpointFiles(tmp_path / "many")
    assert list(many.files) == [f"model-{i:05d}-of-000009.safetensors" for i in range(1, 10)]
    assert one.tensors.keys() == many.tensors.keys()
    assert all(one.read(name).tobytes() == many.read(name).tobytes() for name in one.tensors)
    sizes = [sum(t.end - t.start for t in file.tensors.values()) for file in many.files.values()]
    assert max(sizes) <= 150_000
    firsts = [next(iter(file.tensors.values())) for file in many.files.values()]
    pairs = zip(sizes[:-1], firsts[1:], strict=True)
    assert all(size + first.end - first.start > 150_000 for size, first in pairs)  # a new file only where needed
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)


def test_tensor_larger_than_a_file_has_one_of_its_own(tmp_path):
    synthesize(THREE_LAYERS, tmp_path / "out", file_bytes=100_000)
    files = CheckpointFiles(tmp_path / "out").files.values()
    large = [f for f in files if any(t.end - t.start > 100_000 for t in f.tensors.values())]
    assert [list(file.tensors) for file in large] == [
        ["language_model.model.embed_tokens.weight"],
        ["language_model.lm_head.weight"],
    ]


def test_layout_is_the_real_one(tmp_path):
    synthesize(THREE_LAYERS, tmp_path / "out")
    files = CheckpointFiles(tmp_path / "out")
    layer = "language_model.model.layers.1."
    found = {name: (files.tensors[name].dtype, files.tensors[name].shape) for name in files.tensors}
    assert found[f"{layer}self_attn.A_log"] == ("F32", (16,))
    assert found[f"{layer}self_attn.q_conv1d.weight"] == ("F32", (64, 1, 4))
    assert found[f"{layer}block_sparse_moe.experts.3.w1.weight_scale"] == ("U8", (64, 2))
    assert found["vision_tower.patch_embed.proj.weight"] == ("BF16", (32, 3, 2, 2))
    tail = files.read(f"{layer}self_attn.A_log")
    assert np.all(tail[:4] > 0)
    assert np.all(tail[4:] == 0)


def test_folder_that_is_not_empty(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty; choose another directory"):
        synthesize(THREE_LAYERS, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_room_and_configuration_are_looked_at_first(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no-such-model"):
        synthesize("no-such-model", tmp_path / "out")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 1000))
    with pytest.raises(CheckpointError, match="1,098,496 bytes are needed, the disk has 1,000 left"):
        synthesize(THREE_LAYERS, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.xdist_group("tiny-k3 one")  # compiled functions are shared with the tests of the golden outputs
def test_every_expert_is_used(tmp_path):
    seen = []
    synthesize("tiny-k3", tmp_path / "out", progress=lambda *report: seen.append(report))
    assert seen[-1][1] == seen[-1][2]
    model = kj.load_model(tmp_path / "out", dtype="float32")
    tokens = np.random.default_rng(0).integers(0, 512, (8, 150))
    assert np.isfinite(np.asarray(kj.forward(model, tokens, np.full(8, 150)))).all()
    trace = kj.trace(model, tokens[:1])
    layers = [index for index in trace.router_index if index is not None]
    assert len(layers) == 8
    for index in layers:
        load = np.bincount(np.asarray(index).ravel(), minlength=16)
        assert load.min() > 0
        assert load.max() < 4 * 150 * 4 / 16
    for hidden in trace.mlp_in:  # behind a norm: alive, neither dead nor saturated
        assert 0.1 < float(np.std(np.asarray(hidden))) < 10
