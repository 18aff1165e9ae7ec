"""Loading: which tensors a checkpoint must hold, what becomes of them, and where their bytes lie."""

import json
import re
from collections import defaultdict
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.safetensors_file import SafetensorsFile
from kimi_jax.config import ConfigError
from kimi_jax.model.model import flatten
from kimi_jax.parallel.mesh import MeshError

BF16, F32 = ml_dtypes.bfloat16, np.float32
PREFIX = "language_model."
LAYER = "language_model.model.layers."
NORM = "language_model.model.norm.weight"
HEAD = "language_model.lm_head.weight"
EXPERT = f"{LAYER}1.block_sparse_moe.experts.3.w2"
LINEAR_EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2"
A_LOG = f"{LAYER}0.self_attn.A_log"


def convert(pattern, function):
    """A change for `edited`: `function` on the array of every tensor whose name ends in `pattern`."""

    def change(tensors):
        names = [name for name in tensors if re.search(f"{pattern}$", name)]
        assert names
        for name in names:
            tensors[name] = tensors[name].of(np.ascontiguousarray(function(tensors[name].array)))

    return change


def add(*names, array=None):
    """A change for `edited`: new tensors of these names."""
    array = np.ones(3, BF16) if array is None else array
    return lambda tensors: tensors.update({name: tensors[next(iter(tensors))].of(array) for name in names})


def drop(pattern):
    """A change for `edited`: tensors whose names end in `pattern` are removed."""

    def change(tensors):
        names = [name for name in tensors if re.search(f"{pattern}$", name)]
        assert names
        for name in names:
            del tensors[name]

    return change


def rename(function):
    """A change for `edited`: every tensor under another name."""

    def change(tensors):
        items = list(tensors.items())
        tensors.clear()
        tensors.update({function(name): tensor for name, tensor in items})

    return change


def both(*changes):
    return lambda tensors: [change(tensors) for change in changes]


def with_text(**fields):
    """A config edit: fields of `text_config`, or of a flat config; None removes one."""

    def edit(raw):
        for path, value in fields.items():
            *parents, name = path.split(".")
            branch = raw.get("text_config", raw)
            for parent in parents:
                branch = branch[parent]
            branch.pop(name, None) if value is None else branch.update({name: value})

    return edit


def flat(raw):
    """A config edit: K3's text configuration without the nesting."""
    text = raw.pop("text_config")
    return raw | text | {"architectures": raw["architectures"]}


def plain(name):
    return name.removeprefix(PREFIX)


def expected_params(tensors):
    """The parameters by dotted name, from the files' tensors and the naming rule alone."""
    params, experts = {}, defaultdict(dict)
    for full, tensor in tensors.items():
        name = plain(full).removeprefix("model.")
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts[f"{match[1]}.{match[3]}"][int(match[2])] = tensor.array
        elif name.endswith(".A_log"):
            params[name] = tensor.array.reshape(-1)[:4]  # all the tiny models have 4 heads
        elif "_conv1d." in name:
            params[name] = tensor.array.reshape(-1, 4)
        else:
            params[name] = tensor.array
    return params | {name: np.stack([e[i] for i in range(len(e))]) for name, e in experts.items()}


def check_params(model, tensors):
    """Every parameter has the files' dtype and bits, and there are no others."""
    found, expected = dict(flatten(model.params)), expected_params(tensors)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(np.asarray(array), expected[name], strict=True, err_msg=name)


# What is loaded


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear", "tiny-k31"])
def test_parameters_are_the_files_tensors_bit_for_bit(tiny, checkpoint, stored, name):
    model = tiny(name)
    check_params(model, stored(checkpoint(name)))
    assert model.dtype == jnp.float32
    assert model.vision_tensors == 0


def test_bfloat16_and_float32_are_kept_as_stored(edited, stored):
    widen, narrow = (lambda x: x.astype(F32) * F32(1.001)), (lambda x: x.astype(BF16))
    directory = edited(
        "tiny-kimi-linear",
        both(
            convert(r"embed_tokens\.weight", widen),
            convert(r"layers\.2\.self_attn\.q_conv1d\.weight", widen),
            convert(r"layers\.1\.block_sparse_moe\.experts\.\d+\.w1\.weight", widen),
            convert(r"layers\.0\.self_attn\.A_log", narrow),
        ),
    )
    model = kj.load_model(directory, dtype="bfloat16")
    check_params(model, stored(directory))
    dtypes = {name: array.dtype for name, array in flatten(model.params)}
    assert dtypes["embed_tokens.weight"] == F32
    assert dtypes["layers.2.self_attn.q_conv1d.weight"] == F32
    assert dtypes["layers.2.self_attn.k_conv1d.weight"] == BF16
    assert dtypes["layers.1.block_sparse_moe.experts.w1.weight"] == F32
    assert dtypes["layers.1.block_sparse_moe.experts.w3.weight"] == BF16
    assert dtypes["layers.0.self_attn.A_log"] == BF16
    assert dtypes["layers.1.self_attn.A_log"] == F32


VISION = ("vision_tower.patch_embed.proj.weight", "vision_tower.encoder.blocks.0.wo.weight", "mm_projector.x.weight")
PLAIN_A_LOG = convert(r"\.A_log", lambda x: x[:4])
VARIANTS = {
    "A_log unpadded": (PLAIN_A_LOG, None),
    "A_log [1, 1, N, 1]": (convert(r"\.A_log", lambda x: x[:4].reshape(1, 1, 4, 1)), None),
    "convolution [C, 4]": (convert(r"_conv1d\.weight", lambda x: x[:, 0]), None),
    "nested, plain names": (rename(plain), None),
    "flat, prefixed names": (None, flat),
    "flat, plain names": (rename(plain), flat),
    "weight_shape": (add(f"{EXPERT}.weight_shape", array=np.array([64, 64], np.int64)), None),
    "vision": (add(*VISION), None),
}


@pytest.fixture(scope="module")
def ids(golden):
    return golden("tiny-k3")["seq_input_ids"][None, :16]


@pytest.fixture(scope="module")
def logits(tiny, golden, ids):
    found = np.asarray(kj.forward(tiny("tiny-k3"), ids))
    np.testing.assert_allclose(found[0], golden("tiny-k3")["seq_logits"][:16], atol=2e-3, rtol=0)
    return found


@pytest.mark.xdist_group("tiny-k3 one")  # one compiled function serves all of them
@pytest.mark.parametrize("variant", VARIANTS)
def test_forms_of_one_checkpoint_give_equal_logits(edited, tiny, ids, logits, variant):
    model = kj.load_model(edited("tiny-k3", *VARIANTS[variant]), dtype="float32")
    assert model.config == tiny("tiny-k3").config
    assert model.vision_tensors == (3 if variant == "vision" else 0)
    np.testing.assert_array_equal(kj.forward(model, ids), logits)


# Names


@pytest.mark.parametrize(
    ("change", "missing", "extra"),
    [
        (drop(NORM), [NORM], []),
        (drop(f"{EXPERT}.weight_scale"), [f"{EXPERT}.weight_scale"], []),
        (rename(lambda n: n.replace("lm_head", "head.lm")), [HEAD], ["language_model.head.lm.weight"]),
        (rename(lambda n: n.replace("1.block_sparse_moe.experts.7.w1", "1.block_sparse_moe.experts.8.w1")),
         [".7.w1.weight_packed", ".7.w1.weight_scale"], [".8.w1.weight_packed", ".8.w1.weight_scale"]),
        (add("language_model.model.norm.bias"), [], ["language_model.model.norm.bias"]),
        (add("visual.proj.weight", "model.norm.weight"), [], ["visual.proj.weight", "model.norm.weight"]),
        (add(f"{LAYER}6.input_layernorm.weight"), [], [f"{LAYER}6.input_layernorm.weight"]),
    ],
    ids=["drop", "drop expert", "rename", "rename expert", "add", "add two", "add layer"],
)  # fmt: skip
def test_every_tensor_has_its_place(edited, refused, change, missing, extra):
    directory = edited("tiny-k31", change)
    text = refused(directory)
    lines = text.splitlines()
    lost = [line for line in lines if line.startswith("missing tensor ") and f" in {directory}" in line]
    more = [line for line in lines if line.startswith("extra tensor ")]
    assert all(any(name in line for line in lost) for name in missing)
    assert all(any(name in line for line in more) for name in extra)
    assert all(re.search(rf" in {directory}/model-0000[12]-of-000002.safetensors: ", line) for line in more)
    assert bool(lost) == bool(missing)
    assert bool(more) == bool(extra)


def test_missing_head_is_told_from_a_renamed_one(edited, refused):
    assert "extra" not in refused(edited("tiny-k31", drop(HEAD)), f"missing tensor {HEAD}", "tie_word_embeddings false")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dsa_config": None, "q_lora_rank": None}, f"missing tensor {LAYER}2.self_attn.q_proj.weight"),
        ({"dsa_config": None}, f"extra tensor {LAYER}2.self_attn.indexer.wk.weight"),
        ({"mla_use_output_gate": False}, f"extra tensor {LAYER}2.self_attn.g_proj.weight"),
        ({"linear_attn_config.use_full_rank_gate": False}, f"missing tensor {LAYER}0.self_attn.g_a_proj.weight"),
        ({"first_k_dense_replace": 2}, f"missing tensor {LAYER}1.mlp.gate_proj.weight"),
        ({"attn_res_block_size": None}, f"extra tensor {LAYER}0.mlp_res_norm.weight"),
        ({"latent_moe_use_norm": None}, f"extra tensor {LAYER}1.block_sparse_moe.routed_expert_norm.weight"),
        ({"num_shared_experts": 2}, "shape [64, 96], wanted [128, 96]"),
        ({"vocab_size": 500}, f"tensor {HEAD} in "),
    ],
    ids=str,
)
def test_configuration_that_the_tensors_contradict(edited, refused, fields, words):
    refused(edited("tiny-k31", config=with_text(**fields)), words)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_tied_embeddings(edited, refused, golden, tied, head):
    directory = edited(
        "tiny-kimi-linear", None if head else drop("lm_head.weight"), with_text(tie_word_embeddings=tied)
    )
    if tied and head:
        refused(directory, "extra tensor lm_head.weight", "model-00002", "tie_word_embeddings true")
        return
    if not tied and not head:
        refused(directory, "missing tensor lm_head.weight", str(directory), "tie_word_embeddings false")
        return
    model = kj.load_model(directory, dtype="float32")
    assert ("lm_head" in model.params) == head
    hidden = golden("tiny-kimi-linear")["seq_final_norm_in"][:3].astype(np.float64)
    norm, matrix = (
        np.asarray(model.params[name]["weight"]).astype(np.float64)
        for name in ("norm", "lm_head" if head else "embed_tokens")
    )
    normed = hidden / np.sqrt(np.mean(hidden**2, axis=-1, keepdims=True) + 1e-5) * norm
    found = model.module.logits(jnp.asarray(hidden, F32))
    np.testing.assert_allclose(found, normed @ matrix.T, atol=1e-4)


# Shapes, dtypes and bytes


@pytest.mark.parametrize(
    ("pattern", "function", "words"),
    [
        (NORM, lambda x: x[:64], f"tensor {NORM} in {{}}2-of-000002.safetensors: shape [64], wanted [96]"),
        (HEAD, lambda x: x.T, f"tensor {HEAD} in {{}}2-of-000002.safetensors: shape [96, 512], wanted [512, 96]"),
        (HEAD, lambda x: x[None], "shape [1, 512, 96], wanted [512, 96]"),
        (f"{EXPERT}.weight_packed", lambda x: x[:, :16], f"{EXPERT}.weight_packed in {{}}1-of-000002.safetensors: "),
        (f"{EXPERT}.weight_scale", lambda x: x.repeat(2, 1), "shape [64, 4], wanted [64, 2]"),
        (A_LOG, lambda x: x[:8], f"tensor {A_LOG} in {{}}1-of-000002.safetensors: shape [8], wanted [16] or [4] or "),
        (A_LOG, lambda x: x.reshape(4, 4), "shape [4, 4], wanted [16] or [4] or [1, 1, 4, 1]"),
        (r"0\.self_attn\.q_conv1d\.weight", lambda x: x[:, 0].T, "shape [4, 64], wanted [64, 1, 4] or [64, 4]"),
        (NORM, lambda x: x.astype(np.float16), f"{NORM} in {{}}2-of-000002.safetensors: dtype F16, wanted BF16 or F32"),
        (A_LOG, lambda x: x.astype(np.float16), f"{A_LOG} in {{}}1-of-000002.safetensors: dtype F16, wanted F32"),
        (A_LOG, lambda x: x.astype(np.float64), "dtype F64, wanted F32 or BF16; convert the checkpoint"),
        (HEAD, lambda x: x.astype(np.float16).view(np.uint8)[:, ::2], "dtype U8, wanted BF16 or F32"),
        (f"{EXPERT}.weight_scale", lambda x: x.astype(F32), f"{EXPERT}.weight_scale in {{}}1-of-000002.safetensors: "),
        (f"{EXPERT}.weight_packed", lambda x: x.astype(BF16), "dtype BF16, wanted U8; convert the checkpoint"),
    ],
)  # fmt: skip
def test_wrong_shape_or_dtype(edited, refused, pattern, function, words):
    directory = edited("tiny-k31", convert(pattern, function))
    text = refused(directory, words.format(f"{directory}/model-0000"))
    assert len({line.split(":")[0] for line in text.splitlines()}) == 1  # no other tensor is blamed


def test_signed_bytes_are_not_packed_weights(edited, refused):
    name = f"{EXPERT}.weight_packed"
    directory = edited("tiny-k31", lambda tensors: tensors.update({name: tensors[name]._replace(dtype="I8")}))
    refused(directory, f"tensor {name} in ", "dtype I8, wanted U8")


def test_long_lists_of_faults_are_cut(edited, refused):
    # 5 layers of 8 experts with 3 projections: 120 weights are missing, 240 packed and scales are extra; ten of each
    # kind are listed
    text = refused(edited("tiny-k31", config=with_text(quantization_config=None)), "… and 340 more")
    assert len(text.splitlines()) == 21
    assert "quantization_config" in text


def test_packed_configuration_with_an_unpacked_projection(edited, refused):
    unpacked = both(drop(f"{EXPERT}.weight_(packed|scale)"), add(f"{EXPERT}.weight", array=np.ones((64, 64), BF16)))
    directory = edited("tiny-k31", unpacked)
    text = refused(
        directory,
        f"missing tensor {EXPERT}.weight_packed in {directory}: the configuration says MXFP4, but ",
        f"missing tensor {EXPERT}.weight_scale in {directory}: the configuration says MXFP4, but ",
        f"holds {EXPERT}.weight",
        f"extra tensor {EXPERT}.weight in ",
    )
    assert len(text.splitlines()) == 3


def test_unpacked_configuration_with_a_packed_projection(edited, refused):
    packed = both(
        drop(f"{LINEAR_EXPERT}.weight"),
        add(f"{LINEAR_EXPERT}.weight_packed", array=np.ones((128, 24), np.uint8)),
        add(f"{LINEAR_EXPERT}.weight_scale", array=np.ones((128, 2), np.uint8)),
    )
    directory = edited("tiny-kimi-linear", packed)
    refused(
        directory,
        f"missing tensor {LINEAR_EXPERT}.weight in {directory}",
        f"extra tensor {LINEAR_EXPERT}.weight_packed in {directory}/model-00002-of-000002.safetensors: ",
        f"extra tensor {LINEAR_EXPERT}.weight_scale",
        "the configuration has no quantization_config",
    )


def test_experts_of_one_projection_share_a_dtype(edited, refused):
    directory = edited("tiny-kimi-linear", convert(f"{LINEAR_EXPERT}.weight", lambda x: x.astype(F32)))
    first = LINEAR_EXPERT.replace("experts.3", "experts.0")
    refused(directory, f"tensor {LINEAR_EXPERT}.weight in ", f"dtype F32, but {first}.weight has BF16")


@pytest.mark.parametrize("name", ["weight_global_scale", "input_global_scale"])
def test_nvfp4_scales_are_refused_by_name(edited, refused, name):
    directory = edited("tiny-k31", add(f"{EXPERT}.{name}", array=np.ones(1, F32)))
    refused(directory, f"extra tensor {EXPERT}.{name} in ", "it belongs to NVFP4, only MXFP4 experts are supported")


@pytest.mark.parametrize("name", [f"{EXPERT}.weight_shape", f"{NORM.removesuffix('.weight')}.weight_shape"])
def test_only_two_numbers_beside_a_packed_weight_are_its_shape(edited, refused, name):
    shape = np.array([64] if "experts" in name else [64, 64], np.int64)
    refused(edited("tiny-k31", add(name, array=shape)), f"extra tensor {name} in ")


@pytest.mark.parametrize("place", [4, 15])
@pytest.mark.parametrize("layer", [0, 3])
def test_padding_of_A_log_must_be_zero(edited, layer, place):  # noqa: N802
    name = f"{LAYER}{layer}.self_attn.A_log"

    def fill(array):
        return np.where(np.arange(16) == place, F32(1e-3), array)

    directory = edited("tiny-k31", convert(name, fill))
    with pytest.raises(ValueError, match="zero padding") as caught:
        kj.load_model(directory)
    for word in (f"tensor {name} in {directory}/model-0000", "4 numbers are one a head", "12 behind", "found 0.001"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "expert", "projection", "place", "mesh"),
    [
        (1, 0, "w1", 0, None),
        (3, 5, "w3", 64, None),
        (5, 7, "w2", -1, None),
        (5, 7, "w2", -1, {"data": 2, "tensor": 4}),
    ],
)
def test_scale_byte_that_is_nan(edited, layer, expert, projection, place, mesh):
    name = f"{LAYER}{layer}.block_sparse_moe.experts.{expert}.{projection}.weight_scale"

    def spoil(array):
        array = array.copy()
        array.flat[place] = 255
        return array

    directory = edited("tiny-k31", convert(re.escape(name), spoil))
    with pytest.raises(ValueError, match="NaN") as caught:
        kj.load_model(directory, mesh=kj.make_mesh(mesh))
    assert f"tensor {name} in {directory}/model-0000" in str(caught.value)
    assert "a scale byte is 255" in str(caught.value)


def test_largest_finite_scale_byte_is_loaded(edited, stored):
    directory = edited("tiny-k31", convert(r"experts\.2\.w1\.weight_scale", lambda x: np.full_like(x, 254)))
    check_params(kj.load_model(directory), stored(directory))


# Devices


@pytest.fixture(scope="module")
def spread():
    """tiny-k3 on 2 × 4 devices, what loading told of its progress, and the bytes it took from each tensor."""
    taken = defaultdict(list)

    original, told = SafetensorsFile.read, []

    def read(self, name, *arguments):
        part = original(self, name, *arguments)
        taken[name].append(part.nbytes)
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsFile, "read", read)
        mesh = kj.make_mesh({"data": 2, "tensor": 4})
        model = kj.load_model(
            Path(kj.__file__).parent / "data" / "tiny-k3",
            mesh=mesh,
            dtype="bfloat16",
            progress=lambda *counts: told.append(counts),
        )
    return model, told, taken


def test_every_device_holds_its_part_of_the_files(spread, checkpoint, stored):
    model = spread[0]
    tensors = stored(checkpoint("tiny-k3"))
    check_params(model, tensors)
    expected = expected_params(tensors)
    for name, array in flatten(model.params):
        assert len(array.addressable_shards) == 8
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[name][shard.index], strict=True)


def test_computing_in_bfloat16_leaves_float32_parameters_alone(spread):
    model = spread[0]
    assert model.dtype == jnp.bfloat16
    kept = r"\.(A_log|dt_bias|[qkv]_conv1d\.weight|o_norm\.weight|e_score_correction_bias)$"
    for name, array in flatten(model.params):
        wanted = "uint8" if ".experts." in name else "float32" if re.search(kept, name) else "bfloat16"
        assert (name, array.dtype) == (name, wanted)


@pytest.mark.parametrize(
    ("name", "whole", "part"),
    [
        ("layers.1.block_sparse_moe.experts.w1.weight_packed", (16, 64, 32), (2, 64, 32)),
        ("layers.8.block_sparse_moe.experts.w2.weight_scale", (16, 64, 2), (2, 64, 2)),
        ("layers.1.block_sparse_moe.gate.weight", (16, 128), (4, 128)),
        ("layers.1.block_sparse_moe.shared_experts.down_proj.weight", (128, 128), (128, 32)),
        ("layers.0.self_attn.A_log", (4,), (1,)),
        ("layers.0.self_attn.k_conv1d.weight", (64, 4), (16, 4)),
        ("layers.0.self_attn.o_proj.weight", (128, 64), (128, 16)),
        ("layers.8.self_attn.kv_b_proj.weight", (128, 32), (32, 32)),
        ("layers.0.mlp.up_proj.weight", (192, 128), (48, 128)),
        ("embed_tokens.weight", (512, 128), (128, 128)),
        ("norm.weight", (128,), (128,)),
    ],
)
def test_share_of_a_device(spread, name, whole, part):
    array = dict(flatten(spread[0].params))[name]
    assert array.shape == whole
    assert {shard.data.shape for shard in array.addressable_shards} == {part}


def test_no_expert_lies_on_two_devices(spread, checkpoint, stored):
    held = sum(
        shard.data.nbytes
        for name, array in flatten(spread[0].params)
        if ".experts." in name
        for shard in array.addressable_shards
    )
    assert held == sum(len(t.data) for n, t in stored(checkpoint("tiny-k3")).items() if ".experts." in n)


def test_only_rows_of_devices_are_read_and_each_once(spread, checkpoint, stored):
    taken = spread[2]
    tensors = stored(checkpoint("tiny-k3"))
    assert taken.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if not name.endswith(".A_log"):  # its padding is looked at with every slice
            assert (name, sum(taken[name])) == (name, len(tensor.data))
    assert max(taken[HEAD]) == len(tensors[HEAD].data) // 4
    # Columns over devices: the rows are read once, whole.
    assert len(taken[f"{LAYER}4.self_attn.o_proj.weight"]) == 1


def test_progress_counts_the_parameters_to_the_end(spread, checkpoint, stored):
    told = spread[1]
    padding = 6 * 12 * 4  # behind the 4 heads' numbers in A_log of 6 layers
    total = sum(len(tensor.data) for tensor in stored(checkpoint("tiny-k3")).values()) - padding
    assert {counts[1] for counts in told} == {total}
    placed = [counts[0] for counts in told]
    assert placed == sorted(set(placed))
    assert placed[-1] == total


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"tensor": 3}, ["embed_tokens.weight", "axis 'vocab' of 512", "'tensor' of 3: 3 does not divide 512"]),
        ({"tensor": 8}, ["layers.0.self_attn.", "axis 'heads' of 4", "'tensor' of 8: 8 does not divide 4"]),
        ({"data": 3}, ["layers.1.block_sparse_moe.experts.w1.", "axis 'experts' of 16", "'data' of 3: 3 does not"]),
        ({"data": 5}, ["axis 'experts' of 16", "'data' of 5: 5 does not divide 16"]),
        ({"data": 3, "tensor": 2}, ["axis 'experts' of 16", "'data×tensor' of 6: 6 does not divide 16"]),
    ],
    ids=str,
)
def test_mesh_that_does_not_divide(edited, refused, mesh, words):
    # The bad bytes would be found if anything were read.
    directory = edited("tiny-k3", convert(r"\.A_log|\.weight_scale", lambda x: np.full_like(x, 255)))
    refused(directory, *words, error=MeshError, mesh=kj.make_mesh(mesh))


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("float16", "dtype 'float16' is not a compute dtype; use bfloat16, float32, float64"),
        (np.dtype("float16"), "dtype 'float16' is not a compute dtype"),
        ("bf16", "dtype 'bf16' is not a compute dtype"),
        ("int32", "dtype 'int32' is not a compute dtype"),
        ("float64", "dtype float64 needs jax.config.update('jax_enable_x64', True)"),
        (np.dtype("float64"), "dtype float64 needs"),
    ],
)
def test_compute_dtype(checkpoint, refused, dtype, words):
    refused(checkpoint("tiny-k31"), words, error=ValueError, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "wanted"), [(jnp.dtype("float32"), "float32"), ("bfloat16", "bfloat16"), (jnp.float32, "float32")]
)
def test_compute_dtype_by_name_or_type(checkpoint, dtype, wanted):
    assert kj.load_model(checkpoint("tiny-k31"), dtype=dtype).dtype == wanted


# K3.1's indexer


def without(*keys):
    def edit(raw):
        for key in keys:
            del raw["text_config"]["dsa_config"][key]

    return edit


SIZES = ("index_n_heads", "index_head_dim")
INDEXER = f"{LAYER}2.self_attn.indexer"


@pytest.mark.parametrize(("keys", "bias"), [((), False), (SIZES[:1], True), (SIZES[1:], True), (SIZES, False)])
def test_indexer_sizes_come_from_the_tensors(edited, stored, keys, bias):
    directory = edited("tiny-k31", None if bias else drop(r"k_norm\.bias"), without(*keys))
    model = kj.load_model(directory)
    indexer = model.config.indexer
    assert (indexer.num_heads, indexer.head_dim, indexer.key_norm_bias) == (8, 16, bias)
    check_params(model, stored(directory))


@pytest.mark.parametrize(("key", "tensor"), [("index_n_heads", "weights_proj"), ("index_head_dim", "wk")])
def test_indexer_size_that_nothing_tells(edited, refused, key, tensor):
    directory = edited("tiny-k31", drop(rf"indexer\.{tensor}\.weight"), without(*SIZES))
    refused(directory, f"dsa_config has no '{key}'", f"{INDEXER}.*", "add the key")


def test_indexer_size_that_the_tensors_contradict(edited, refused):
    directory = edited("tiny-k31", config=lambda raw: raw["text_config"]["dsa_config"].update(index_n_heads=4))
    refused(directory, f"tensor {INDEXER}.weights_proj.weight in ", "shape [8, 96], wanted [4, 96]")


def test_key_norm_bias_in_some_layers_only(edited, refused):
    later = f"{LAYER}5.self_attn.indexer.k_norm.bias"
    refused(edited("tiny-k31", drop(later)), f"missing tensor {later}")


def test_key_norm_bias_in_later_layers_only(edited, refused):
    bias = "self_attn.indexer.k_norm.bias"
    refused(
        edited("tiny-k31", drop(f"{LAYER}2.{bias}")), f"extra tensor {LAYER}4.{bias}", f"extra tensor {LAYER}5.{bias}"
    )


# The generation configuration


@pytest.mark.parametrize(
    ("eos", "stop_ids"), [(7, (7, 510)), ([510, 7, 300], (7, 300, 510)), ([], (510,)), (None, (510,))]
)
def test_generation_config_adds_stop_ids(checkpoint, eos, stop_ids):
    directory = checkpoint("tiny-k31")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "temperature": 1.0}))
    model = kj.load_model(directory)
    assert model.stop_ids == stop_ids
    assert model.config.eos_ids == (510,)


def test_no_generation_config(tiny):
    assert tiny("tiny-k31").stop_ids == (510,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not a JSON file"),
        ("[]", ""),
        ('{"eos_token_id": "x"}', "field 'eos_token_id' must be a token id or a list of them, found 'x'"),
        ('{"eos_token_id": [510, true]}', "found [510, True]"),
        ('{"eos_token_id": -1}', "found -1"),
    ],
)
def test_malformed_generation_config(checkpoint, refused, text, words):
    directory = checkpoint("tiny-k31")
    (directory / "generation_config.json").write_text(text)
    refused(directory, str(directory / "generation_config.json"), words, error=ConfigError)


def test_layers_of_different_dtypes_are_not_stacked(edited, refused):
    """A stack would cast them to the dtype of its first layer."""
    name = r"layers\.5\.input_layernorm\.weight"
    directory = edited("tiny-k3", convert(name, lambda x: x.astype(np.float32)))
    refused(directory, "tensor layers.5.input_layernorm.weight is float32", "load with loop=False", loop=True)
