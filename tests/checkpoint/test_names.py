"""The names, shapes and dtypes that a configuration asks for, against the published Kimi K3."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.check import compare_names
from kimi_jax.checkpoint.names import is_vision, stored_name, stored_tensors

SOURCE = Path(__file__).parents[2]
INDEX = SOURCE.parent / "shared" / "k3" / "model.safetensors.index.json.gz"

# In a process of its own: the run-time type checker makes half a million records three times as slow.
PROGRAM = """
import gzip, json, math, sys
from collections import Counter
from pathlib import Path
import kimi_jax as kj
from kimi_jax.checkpoint.check import compare_names
from kimi_jax.checkpoint.names import stored_tensors, vision_tensors
from kimi_jax.checkpoint.safetensors_file import read_index

config = kj.ModelConfig.from_file("kimi-k3")
width = {"U8": 1, "BF16": 2, "F32": 4}
count, size = Counter(), Counter()
for kind, tensors in (("text", stored_tensors(config)), ("vision", vision_tensors(config.vision))):
    for tensor in tensors:
        part = "experts" if tensor.expert is not None else kind
        count[part] += 1
        size[part] += math.prod(tensor.shapes[0]) * width[tensor.dtypes[0]]
found = {"count": count, "size": size}
if len(sys.argv) > 1:
    path = Path(sys.argv[1])
    report = compare_names(config, read_index(str(path), gzip.open(path).read())[0])
    found["report"] = [report.matched, report.missing, report.extra]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def published():
    arguments = [str(INDEX)] if INDEX.is_file() else []
    environment = os.environ | {"PYTHONPATH": str(Path(kj.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_bytes_of_kimi_k3_to_the_byte(published):
    assert sum(published["size"].values()) == 1_560_860_324_864
    assert published["size"]["experts"] == 1_446_456_066_048
    assert published["size"]["vision"] == 2 * (401_214_464 + 46_144_512)
    assert sum(published["count"].values()) == 497_220
    assert published["count"]["experts"] == 92 * 896 * 3 * 2


def test_names_of_kimi_k3_are_those_of_its_index(published):
    if "report" not in published:
        pytest.skip(f"the published index is not at {INDEX}")
    assert published["report"] == [497_220, [], []]


@pytest.mark.parametrize(("name", "count"), [("tiny-k3", 1002), ("tiny-kimi-linear", 423)])
def test_names_of_a_tiny_checkpoint(checkpoint, name, count):
    directory = checkpoint(name)
    names = list(json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"])
    report = compare_names(kj.ModelConfig.from_file(directory), names)
    assert (report.matched, report.missing, report.extra) == (count, (), ())


def test_report_lists_names_as_the_checkpoint_has_them(checkpoint):
    directory = checkpoint("tiny-k31")
    names = set(json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"])
    config = kj.ModelConfig.from_file(directory).with_indexer_sizes(8, 16, key_norm_bias=True)
    lost = {
        "language_model.lm_head.weight",
        "language_model.model.layers.1.block_sparse_moe.experts.7.w2.weight_packed",
    }
    new = {"language_model.head.weight", "language_model.vision.weight"}
    # Without a vision_config the tower's names are not judged; nor is the shape beside a packed weight.
    passed = {"vision_tower.x.weight", "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_shape"}
    report = compare_names(config, names - lost | new | passed)
    assert report.matched == len(names) - 2
    assert report.missing == tuple(sorted(lost))
    assert report.extra == tuple(sorted(new))


@pytest.mark.parametrize(
    ("param", "expert", "name"),
    [
        ("lm_head.weight", None, "lm_head.weight"),
        ("norm.weight", None, "model.norm.weight"),
        ("layers.0.self_attn.A_log", None, "model.layers.0.self_attn.A_log"),
        (
            "layers.92.block_sparse_moe.experts.w2.weight_scale",
            895,
            "model.layers.92.block_sparse_moe.experts.895.w2.weight_scale",
        ),
        (
            "layers.1.block_sparse_moe.shared_experts.up_proj.weight",
            None,
            "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight",
        ),
    ],
)
def test_stored_name(param, expert, name):
    assert stored_name(param, expert) == name


@cache
def wanted(name):
    """The stored tensors of a shipped configuration by name, as if it had 16 experts and 4 layers."""
    config = kj.ModelConfig.from_file(name)
    config = replace(config, layer_kinds=config.layer_kinds[:4], moe=replace(config.moe, num_experts=16))
    return {tensor.name: tensor for tensor in stored_tensors(config)}


# Published shape and dtype first, then what is accepted besides.
@pytest.mark.parametrize(
    ("config", "name", "shapes", "dtypes"),
    [
        ("kimi-k3", "layers.0.self_attn.A_log", [(128,), (96,), (1, 1, 96, 1)], ["F32", "BF16"]),
        ("kimi-k3", "layers.0.self_attn.dt_bias", [(12288,)], ["F32", "BF16"]),
        ("kimi-k3", "layers.0.self_attn.q_conv1d.weight", [(12288, 1, 4), (12288, 4)], ["F32", "BF16"]),
        ("kimi-k3", "layers.0.self_attn.o_norm.weight", [(128,)], ["F32", "BF16"]),
        ("kimi-k3", "layers.1.block_sparse_moe.gate.e_score_correction_bias", [(16,)], ["F32", "BF16"]),
        ("kimi-k3", "layers.1.block_sparse_moe.gate.weight", [(16, 7168)], ["BF16", "F32"]),
        ("kimi-k3", "layers.1.block_sparse_moe.experts.15.w1.weight_packed", [(3072, 1792)], ["U8"]),
        ("kimi-k3", "layers.1.block_sparse_moe.experts.0.w3.weight_scale", [(3072, 112)], ["U8"]),
        ("kimi-k3", "layers.1.block_sparse_moe.experts.0.w2.weight_packed", [(3584, 1536)], ["U8"]),
        ("kimi-k3", "layers.1.block_sparse_moe.experts.0.w2.weight_scale", [(3584, 96)], ["U8"]),
        ("kimi-k3", "layers.3.self_attn.q_b_proj.weight", [(96 * 192, 1536)], ["BF16", "F32"]),
        ("kimi-k3", "layers.3.self_attn.kv_b_proj.weight", [(96 * 256, 512)], ["BF16", "F32"]),
        ("kimi-k3", "layers.3.self_attn.kv_a_proj_with_mqa.weight", [(576, 7168)], ["BF16", "F32"]),
        ("kimi-linear-48b", "layers.0.self_attn.A_log", [(1, 1, 32, 1), (32,), (128,)], ["F32", "BF16"]),
        ("kimi-linear-48b", "layers.0.self_attn.o_norm.weight", [(128,)], ["BF16", "F32"]),
        ("kimi-linear-48b", "layers.0.self_attn.v_conv1d.weight", [(4096, 1, 4), (4096, 4)], ["BF16", "F32"]),
        ("kimi-linear-48b", "layers.0.self_attn.g_a_proj.weight", [(128, 2304)], ["BF16", "F32"]),
        ("kimi-linear-48b", "layers.3.self_attn.q_proj.weight", [(32 * 192, 2304)], ["BF16", "F32"]),
        ("kimi-linear-48b", "layers.1.block_sparse_moe.experts.15.w1.weight", [(1024, 2304)], ["BF16", "F32"]),
        ("kimi-linear-48b", "layers.1.block_sparse_moe.experts.15.w2.weight", [(2304, 1024)], ["BF16", "F32"]),
        ("kimi-k3.1-pro", "layers.3.self_attn.indexer.wq_b.weight", [(32 * 128, 1536)], ["BF16", "F32"]),
        ("kimi-k3.1-pro", "layers.3.self_attn.indexer.wk.weight", [(128, 7168)], ["BF16", "F32"]),
        ("kimi-k3.1-pro", "layers.3.self_attn.indexer.weights_proj.weight", [(32, 7168)], ["BF16", "F32"]),
        ("kimi-k3.1-pro", "layers.3.self_attn.indexer.k_norm.weight", [(128,)], ["BF16", "F32"]),
    ],
)
def test_shapes_and_dtypes_of_stored_tensors(config, name, shapes, dtypes):
    tensor = wanted(config)[f"model.{name}"]
    assert list(tensor.shapes) == shapes
    assert list(tensor.dtypes) == dtypes


@pytest.mark.parametrize(
    ("name", "vision"),
    [
        ("vision_tower.encoder.blocks.0.wo.weight", True),
        ("mm_projector.proj.0.weight", True),
        ("model.vision_tower.x", False),
        ("language_model.lm_head.weight", False),
        ("visual.proj.weight", False),
    ],
)
def test_is_vision(name, vision):
    assert is_vision(name) == vision
