"""Adapters in PEFT's format: names, targets and scales as PEFT reads them, and everything that is refused."""

import json
import re

import ml_dtypes
import numpy as np
import pytest

from kimi_jax.checkpoint.adapters import adaptable_names, half_shapes, read_adapters, write_adapters
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.config import ModelConfig
from kimi_jax.model.lora import AdapterSpec

Q, EXPERTS = "layers.3.self_attn.q_b_proj", "layers.3.block_sparse_moe.experts.w2"
LINEAR_Q = "layers.3.self_attn.q_proj"
PREFIX = "base_model.model."


@pytest.fixture(scope="session")
def config(tiny):
    """`config(name)`: configuration of a tiny checkpoint."""
    return lambda name: ModelConfig.from_file(tiny.directory(name))


@pytest.fixture
def written(config, tmp_path):
    """`written(name, *modules)`: random adapters of a tiny model in `tmp_path`, and what they are."""

    def write(name, *modules):
        spec = AdapterSpec(modules)
        rng = np.random.default_rng(0)
        shapes = half_shapes(config(name), spec)
        arrays = {half: rng.normal(size=shape).astype(np.float32) for half, shape in shapes.items()}
        write_adapters(tmp_path, config(name), spec, arrays, base_model="some/model")
        return spec, arrays

    return write


@pytest.fixture
def settings(tmp_path):
    """`settings(field=value)`: edits `adapter_config.json` and returns it."""

    def edit(**fields):
        path = tmp_path / "adapter_config.json"
        raw = json.loads(path.read_text()) | fields
        path.write_text(json.dumps(raw))
        return raw

    return edit


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear", "tiny-k31"])
def test_every_tensor_is_named_after_a_weight_of_the_checkpoint(name, config, written, stored, tiny, tmp_path):
    modules = adaptable_names(config(name))
    written(name, *((module, 3, 2.0) for module in modules))
    weights = stored(tiny.directory(name))
    found = stored(tmp_path)
    halves = {tensor.removeprefix(PREFIX).rpartition(".lora_")[0] for tensor in found}
    for path in halves:
        packed = f"{path}.weight_packed" in weights
        out, into = weights[f"{path}.weight_packed" if packed else f"{path}.weight"].shape
        into *= 2 if packed else 1
        assert found[f"{PREFIX}{path}.lora_A.weight"].shape == (3, into)
        assert found[f"{PREFIX}{path}.lora_B.weight"].shape == (out, 3)
    assert len(found) == 2 * len(halves)
    experts = sum(".experts." in module for module in modules)
    assert len(halves) == len(modules) + (config(name).moe.num_experts - 1) * experts
    not_adaptable = ("gate.weight", "embed_tokens", "conv1d", "norm", "res_proj", ".indexer.", "weight_scale")
    matrices = {n for n, t in weights.items() if len(t.shape) == 2 and not any(word in n for word in not_adaptable)}
    assert len(matrices) == len(halves)


def test_what_is_written_is_read(config, written, tmp_path):
    spec, arrays = written("tiny-k3", (Q, 3, 2.0), (EXPERTS, 2, 0.25), ("lm_head", 3, 1 / 3))
    found_spec, found = read_adapters(tmp_path, config("tiny-k3"))
    assert found_spec == spec
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], array)


def test_experts_have_tensors_of_their_own(written, stored, tmp_path):
    _, arrays = written("tiny-k3", (EXPERTS, 2, 1.0))
    tensors = stored(tmp_path)
    block = f"{PREFIX}language_model.model.layers.3.block_sparse_moe.experts"
    for i in range(16):
        for half in ("lora_A", "lora_B"):
            found = tensors[f"{block}.{i}.w2.{half}.weight"].array
            np.testing.assert_array_equal(found, arrays[f"{EXPERTS}.{half}"][i])


def test_configuration(written, settings):
    raw = written("tiny-kimi-linear", (LINEAR_Q, 4, 2.0), ("lm_head", 4, 2.0), ("layers.0.mlp.up_proj", 2, 0.75))
    raw = settings()
    wanted = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/model",
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": False,
        "bias": "none",
        "rank_pattern": {r"(?:layers\.(?:0)\.mlp\.up_proj)": 2},
        "alpha_pattern": {r"(?:layers\.(?:0)\.mlp\.up_proj)": 1.5},
    }
    assert {field: raw[field] for field in wanted} == wanted


def names_in(config, native):
    """Full names of all modules that can have an adapter, as the checkpoint or transformers' Kimi-Linear calls them."""
    for module in adaptable_names(config):
        found = f"model.{module}" if module != "lm_head" else module
        if native:
            found = found.replace("block_sparse_moe.", "mlp.")
            found = re.sub(r"self_attn\.(f_[ab]_proj)", r"self_attn.forget_gate.\1", found)
        elif ".experts." in found:
            found = found.replace(".experts.", ".experts.11.")
        yield module, found


def targeted(target, name):
    """PEFT's rule: a string is a pattern of the whole name, a list has endings."""
    if isinstance(target, str):
        return re.fullmatch(target, name) is not None
    return any(name == ending or name.endswith(f".{ending}") for ending in target)


def pattern_value(patterns, usual, name):
    """PEFT's rule: the first pattern that fits the end of the name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), usual)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("choice", ["attention and shared experts", "some layers", "experts"])
def test_targets_and_patterns_choose_these_modules_and_no_others(choice, native, config, written, settings):
    config = config("tiny-kimi-linear")
    names = adaptable_names(config)
    if choice == "attention and shared experts":
        chosen = {n: (2, 1.0) if "f_a_proj" in n else (4, 2.0) for n in names if "self_attn" in n or "shared" in n}
    elif choice == "some layers":
        chosen = {
            n: (int(n[7]) + 1, 0.5) for n in names if n[7:8] in ("1", "3", "5") and ("_a_proj" in n or "shared" in n)
        }
    else:
        chosen = {n: (4, 2.0) for n in names if ".experts." in n and not native}
        chosen |= {n: (4, 0.5) for n in names if ".mlp." in n}
    written("tiny-kimi-linear", *((name, *own) for name, own in chosen.items()))
    raw = settings()
    assert isinstance(raw["target_modules"], str if choice == "some layers" else list)
    for module, name in names_in(config, native):
        assert targeted(raw["target_modules"], name) is (module in chosen), name
        if module in chosen:
            rank = pattern_value(raw["rank_pattern"], raw["r"], name)
            alpha = pattern_value(raw["alpha_pattern"], raw["lora_alpha"], name)
            assert (rank, alpha / rank) == chosen[module]


@pytest.mark.parametrize(("fields", "scale"), [({"lora_alpha": 6}, 1.5), ({"use_rslora": True}, 4.0)])
def test_scale_follows_the_configuration(fields, scale, config, written, settings, tmp_path):
    written("tiny-kimi-linear", (LINEAR_Q, 4, 2.0))
    settings(**fields)
    spec, _ = read_adapters(tmp_path, config("tiny-kimi-linear"))
    assert spec.modules == ((LINEAR_Q, 4, scale),)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_numbers_become_float32(dtype, config, written, rewrite, tmp_path):
    _, arrays = written("tiny-kimi-linear", (LINEAR_Q, 4, 2.0))
    change = lambda tensors: tensors.update({n: t.of(t.array.astype(dtype)) for n, t in tensors.items()})  # noqa: E731
    rewrite(tmp_path / "adapter_model.safetensors", change)
    _, found = read_adapters(tmp_path, config("tiny-kimi-linear"))
    for name, array in arrays.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], array.astype(dtype).astype(np.float32))


def rename(old, new):
    def change(tensors):
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def narrow(tensors):
    name = next(name for name in tensors if "q_b_proj.lora_B" in name)
    tensors[name] = tensors[name].of(np.ascontiguousarray(tensors[name].array[:, :2]))


def whole_numbers(tensors):
    name = next(name for name in tensors if "q_b_proj.lora_B" in name)
    tensors[name] = tensors[name].of(tensors[name].array.astype(np.int64))


LAYER = "language_model.model.layers.3."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename("q_b_proj.lora_A", "q_b_proj.lora_C"), r"q_b_proj.lora_C.weight is not half an adapter"),
        (rename("layers.3.", "layers.30."), r"layers\.30\..*: the model has no such module"),
        (rename("q_b_proj", "q_proj"), r"q_proj\.lora_.*: the model has no such module"),
        (rename("self_attn.q_b_proj", "block_sparse_moe.gate"), r"gate\.lora_.*: the model has no such module"),
        (lambda t: t.pop(f"{PREFIX}{LAYER}self_attn.q_b_proj.lora_B.weight"), r"q_b_proj.lora_B.weight is missing"),
        (rename("experts.7.w2.lora_A", "experts.17.w2.lora_A"), r"experts\.7\.w2\.lora_A\.weight is missing"),
        (lambda t: t.update({n.replace(".7.", ".16."): t[n] for n in list(t)}), r"\.16\..*: the model has 16 experts"),
        (narrow, r"q_b_proj\.lora_B\.weight: shape \[96, 2\], wanted \[96, 3\]"),
        (whole_numbers, r"q_b_proj\.lora_B\.weight: dtype I64, wanted F32, BF16, F16"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(change, message, config, written, rewrite, tmp_path):
    written("tiny-k3", (Q, 3, 2.0), (EXPERTS, 3, 2.0))
    path = tmp_path / "adapter_model.safetensors"
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapters(tmp_path, config("tiny-k3"))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_dora", True, "field 'use_dora': True is not supported"),
        ("modules_to_save", ["lm_head"], r"field 'modules_to_save': \['lm_head'\] is not supported"),
        ("bias", "all", "field 'bias': 'all' is not supported"),
        ("layers_to_transform", [1], r"field 'layers_to_transform': \[1\] is not supported"),
        ("use_something_new", {"a": 1}, "field 'use_something_new': .* is not supported"),
        ("peft_type", "LOHA", "peft_type 'LOHA' is not supported, only 'LORA'"),
        ("init_lora_weights", "pissa_niter_4", "'pissa_niter_4' is not supported: it changes the weights below"),
        ("r", 0, "field 'r' must be a whole number from 1 on, found 0"),
        ("r", 2, r"lora_A\.weight: shape \[3, 128\], wanted \[2, 128\]"),
        ("lora_alpha", "8", "field 'lora_alpha' must be a positive number, found '8'"),
        ("rank_pattern", [3], r"field 'rank_pattern' must be an object, found \[3\]"),
        ("rank_pattern", {"(": 3}, r"field 'rank_pattern': '\(' is no pattern"),
        ("alpha_pattern", {"q_proj": -1}, "field 'alpha_pattern' must be a positive number, found -1"),
    ],
)
def test_configurations_that_are_refused(field, value, message, config, written, settings, tmp_path):
    written("tiny-kimi-linear", (LINEAR_Q, 3, 2.0))
    settings(**{field: value})
    with pytest.raises(CheckpointError, match=message):
        read_adapters(tmp_path, config("tiny-kimi-linear"))


def test_experts_of_one_projection_share_a_scale(config, written, settings, tmp_path):
    written("tiny-k3", (EXPERTS, 3, 2.0))
    settings(alpha_pattern={r"experts\.4\.w2": 5})
    with pytest.raises(CheckpointError, match=rf"the experts of {EXPERTS} differ in rank or alpha"):
        read_adapters(tmp_path, config("tiny-k3"))


def test_files_that_are_missing(config, written, tmp_path):
    with pytest.raises(CheckpointError, match="holds no adapters"):
        read_adapters(tmp_path, config("tiny-k3"))
    written("tiny-k3", (Q, 3, 2.0))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="does not exist; adapters in PyTorch's own format are not read"):
        read_adapters(tmp_path, config("tiny-k3"))


def test_arrays_must_be_those_of_the_specification(config, tmp_path):
    spec = AdapterSpec(((Q, 3, 2.0),))
    arrays = {name: np.zeros(shape, np.float32) for name, shape in half_shapes(config("tiny-k3"), spec).items()}
    wrong = arrays | {f"{Q}.lora_A": np.zeros((2, 48), np.float32)}
    with pytest.raises(ValueError, match=rf"{Q}.lora_A has the shape \(2, 48\), wanted \(3, 48\)"):
        write_adapters(tmp_path, config("tiny-k3"), spec, wrong)
    del arrays[f"{Q}.lora_B"]
    with pytest.raises(ValueError, match=rf"{Q}.lora_B has the shape None, wanted \(96, 3\)"):
        write_adapters(tmp_path, config("tiny-k3"), spec, arrays)


BLOCK = f"{PREFIX}model.layers.1.mlp.experts"


@pytest.fixture
def fused(config, written, settings, rewrite, tmp_path):
    """`fused(change)`: as PEFT has adapters of layer 1's experts on transformers' arrays, rank 3 for all; by expert."""

    def make(change=lambda tensors: None):
        written("tiny-kimi-linear", (LINEAR_Q, 3, 2.0))
        settings(target_parameters=["experts.gate_up_proj", "experts.down_proj"], alpha_pattern={"down_proj": 3})
        rng = np.random.default_rng(2)
        shapes = {"base_layer.": (96, 128), "": (128, 48)}  # gate and up of 48 on a width of 128; down
        halves = {
            key: [(rng.normal(size=(3, into)), rng.normal(size=(out, 3))) for _ in range(16)]
            for key, (out, into) in shapes.items()
        }

        def add(tensors):
            like = next(iter(tensors.values()))
            for key, experts in halves.items():
                a = np.concatenate([a for a, _ in experts]).astype(np.float32)
                b = np.stack([b for _, b in experts], axis=-1).reshape(-1, 48).astype(np.float32)
                tensors[f"{BLOCK}.{key}lora_A.weight"] = like.of(a)
                tensors[f"{BLOCK}.{key}lora_B.weight"] = like.of(b)
            change(tensors)

        rewrite(tmp_path / "adapter_model.safetensors", add)
        return halves

    return make


def test_pairs_of_all_experts_are_taken_apart(fused, config, tmp_path):
    halves = fused()
    spec, arrays = read_adapters(tmp_path, config("tiny-kimi-linear"))
    block = "layers.1.block_sparse_moe.experts"
    scales = {"w1": 2.0, "w2": 1.0, "w3": 2.0}
    assert spec.by_name == {LINEAR_Q: (3, 2.0)} | {f"{block}.{w}": (3, scale) for w, scale in scales.items()}
    for expert in range(16):
        change = {w: arrays[f"{block}.{w}.lora_B"][expert] @ arrays[f"{block}.{w}.lora_A"][expert] for w in scales}
        a, b = halves["base_layer."][expert]
        np.testing.assert_allclose(np.concatenate([change["w1"], change["w3"]]), b @ a, rtol=0, atol=1e-5)
        a, b = halves[""][expert]
        np.testing.assert_allclose(change["w2"], b @ a, rtol=0, atol=1e-5)


def cut(tensors):
    name = f"{BLOCK}.lora_A.weight"
    tensors[name] = tensors[name].of(tensors[name].array[:45].copy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(f"{BLOCK}.lora_B.weight"),
            r"experts\.lora_B\.weight is missing, though the other half is there",
        ),
        (cut, r"experts\.lora_A\.weight: shape \[45, 48\], wanted \[48, 48\]"),
        (rename(f"{BLOCK}.base_layer.lora_A", "x"), r"tensor x\.weight is not half an adapter"),
        (rename("layers.1.mlp", "layers.0.mlp"), r"layers\.0\..*: not in the model, or given twice"),
        (lambda t: t.update({f"{BLOCK}.lora_A.weight": t[f"{BLOCK}.base_layer.lora_A.weight"]}), r"are of no array of"),
    ],
)
def test_pairs_that_do_not_fit(change, message, fused, config, tmp_path):
    fused(change)
    with pytest.raises(CheckpointError, match=message):
        read_adapters(tmp_path, config("tiny-kimi-linear"))
