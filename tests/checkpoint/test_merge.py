"""Adapters merged into weights: exact where weights are float, reported where they are MXFP4."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.adapters import adaptable_names, half_shapes, write_adapters
from kimi_jax.checkpoint.merge import merge, rounded_once
from kimi_jax.checkpoint.safetensors_file import INDEX
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.checkpoint.synthesize import synthesize
from kimi_jax.model.lora import AdapterSpec

THREE_LAYERS = Path(__file__).parent / "three-layers.json"
BF16 = ml_dtypes.bfloat16
W2 = "layers.2.block_sparse_moe.experts.w2"
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.5.w2"
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def eight_bits(x):
    """float64 to the nearest number of eight significant bits, ties to even, by whole numbers."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)


def made(config, folder, *modules):
    """Random adapters of these modules, written to `folder`."""
    spec = AdapterSpec(modules)
    rng = np.random.default_rng(1)
    arrays = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in half_shapes(config, spec).items()}
    write_adapters(folder, config, spec, arrays)
    return spec, arrays


def test_bfloat16_modules_bit_for_bit(tiny, stored, tmp_path):
    """Only the modules with adapters change, one expert projection among them; the run's folder is found."""
    directory, out = tiny.directory("tiny-kimi-linear"), tmp_path / "out"
    q, experts = "layers.3.self_attn.q_proj", "layers.1.block_sparse_moe.experts.w3"
    config = tiny("tiny-kimi-linear").config
    _, arrays = made(config, tmp_path / "run" / "adapters", (q, 3, 0.7), (experts, 2, 2.0))
    seen = []
    done = merge(directory, tmp_path / "run", out, progress=lambda *what: seen.append(what))
    assert (done.modules, done.survival) == (2, {})
    old, new = stored(directory), stored(out)
    assert old.keys() == new.keys()
    changed = {name for name in old if old[name] != new[name]}
    of_expert = {i: f"model.layers.1.block_sparse_moe.experts.{i}.w3.weight" for i in range(16)}
    assert changed == {f"model.{q}.weight", *of_expert.values()}
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    cases = [(f"model.{q}.weight", 0.7 * np.einsum("or,ri->oi", wide[f"{q}.lora_B"], wide[f"{q}.lora_A"]))]
    for i, name in of_expert.items():
        cases.append((name, 2.0 * np.einsum("or,ri->oi", wide[f"{experts}.lora_B"][i], wide[f"{experts}.lora_A"][i])))
    for name, change in cases:
        assert new[name].dtype == "BF16"
        wanted = eight_bits(old[name].array.astype(np.float64) + change)
        np.testing.assert_array_equal(new[name].array.astype(np.float64), wanted)
    for name in ("config.json", INDEX):
        assert json.loads((out / name).read_text())["metadata" if name == INDEX else "model_type"] is not None
    assert (out / "config.json").read_bytes() == (directory / "config.json").read_bytes()
    total = sum(len(tensor.data) for tensor in new.values())
    assert seen[-1][1:] == (total, total)


def test_numbers_are_rounded_once():
    """Each lies by less than float32 can tell beside the middle of two bfloat16 numbers, 1 and 1 + 2^-7 and so on."""
    middle, little = 1 + 2.0**-8, 2.0**-40
    x = np.array([middle + little, middle - little, middle, middle + 2.0**-7, middle + 2.0**-7 - little, 0.0, 1e-40])
    wanted = np.array([1 + 2.0**-7, 1, 1, 1 + 2.0**-6, 1 + 2.0**-7, 0, 0])
    for sign in (1, -1):
        np.testing.assert_array_equal(rounded_once(sign * x, np.dtype(BF16)).astype(np.float64)[:6], sign * wanted[:6])
    rng = np.random.default_rng(0)
    many = rng.normal(size=10_000) * np.exp2(rng.integers(-100, 100, 10_000))
    np.testing.assert_array_equal(rounded_once(many, np.dtype(BF16)).astype(np.float64), eight_bits(many))
    np.testing.assert_array_equal(rounded_once(many, np.dtype(np.float32)), many.astype(np.float32))


def test_logits_are_those_with_adapters(rewrite, tmp_path):
    """Three layers of K3 in float32, every module adapted, the routed experts too."""
    directory, out = tmp_path / "base", tmp_path / "out"
    raw = json.loads(THREE_LAYERS.read_text())
    del raw["text_config"]["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    synthesize(tmp_path / "config.json", directory)

    def widen(tensors):
        tensors.update({name: tensor.of(tensor.array.astype(np.float32)) for name, tensor in tensors.items()})

    rewrite(next(directory.glob("*.safetensors")), widen)
    model = kj.load_model(directory, dtype="float32")
    modules = [(name, 2, 1.0) for name in adaptable_names(model.config)]
    spec, _ = made(model.config, tmp_path / "adapters", *modules)
    assert merge(directory, tmp_path / "adapters", out).modules == len(spec.modules)
    adapted = kj.load_model(directory, dtype="float32", adapters=tmp_path / "adapters")
    tokens = jnp.arange(2, 14, dtype=jnp.int32)[None] * 31
    base, found, wanted = (kj.forward(m, tokens) for m in (model, kj.load_model(out, dtype="float32"), adapted))
    assert np.abs(wanted - base).max() > 1
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-4)


def numbers(packed, scale):
    """One row of packed bytes and scales in float64, by the format's definition."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)
    values = np.where(codes < 8, VALUES[codes & 7], -VALUES[codes & 7])
    return values * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32)


@pytest.fixture
def row(tiny, stored):
    """Row 3 of one MXFP4 expert, as numbers."""
    tensors = stored(tiny.directory("tiny-k3"))
    packed, scale = (tensors[f"{EXPERT}.{kind}"].array[3] for kind in ("weight_packed", "weight_scale"))
    return numbers(packed, scale)


@pytest.fixture
def expert_update(tiny, row, tmp_path):
    """`expert_update(factor)`: adapters that add `factor` times that row to it, and nothing else."""

    def make(factor):
        spec = AdapterSpec(((W2, 1, 1.0),))
        config = tiny("tiny-k3").config
        arrays = {name: np.zeros(shape, np.float32) for name, shape in half_shapes(config, spec).items()}
        arrays[f"{W2}.lora_A"][5, 0], arrays[f"{W2}.lora_B"][5, 3, 0] = row, factor
        write_adapters(tmp_path / "adapters", config, spec, arrays)
        return tmp_path / "adapters"

    return make


def test_an_update_of_whole_steps_survives_in_mxfp4(tiny, row, expert_update, stored, tmp_path):
    """The row's sign is turned."""
    directory, out = tiny.directory("tiny-k3"), tmp_path / "out"
    done = merge(directory, expert_update(-2), out, experts=True)
    assert (done.modules, done.survival) == (1, {2: 1.0})
    old, new = stored(directory), stored(out)
    names = {f"{EXPERT}.weight_packed", f"{EXPERT}.weight_scale"}
    other = {name for name in old if ".layers.2." in name and ".w2." in name} - names
    assert all(old[name] == new[name] for name in old.keys() - names - other)
    packed, scale = (new[name].array[3] for name in sorted(names))
    np.testing.assert_array_equal(numbers(packed, scale), -row)


def test_a_tiny_update_does_not_survive_and_is_refused(tiny, expert_update, stored, tmp_path):
    directory, out = tiny.directory("tiny-k3"), tmp_path / "out"
    adapters = expert_update(1e-3)
    told = "less than 50% of the update of MXFP4 experts survives rounding in 1 of 1 layers (layer 2: 0.0%); nothing is"
    with pytest.raises(CheckpointError, match=re.escape(told)):
        merge(directory, adapters, out, experts=True)
    assert list(out.iterdir()) == []
    assert merge(directory, adapters, out, experts=True, force=True).survival == {2: pytest.approx(0, abs=1e-9)}
    assert kj.load_model(out).config.moe.packed


def test_survival_by_hand(tiny, row, expert_update, stored, tmp_path):
    """What is lost of half the row again, compared with what was there and what is read back."""
    done = merge(tiny.directory("tiny-k3"), expert_update(0.5), tmp_path / "out", experts=True, force=True)
    tensors = stored(tmp_path / "out")
    new = numbers(*(tensors[f"{EXPERT}.{kind}"].array[3] for kind in ("weight_packed", "weight_scale")))
    share = 1 - np.sum((1.5 * row - new) ** 2) / np.sum((0.5 * row) ** 2)
    assert 0.1 < share < 0.95
    assert done.survival[2] == pytest.approx(share, rel=1e-9)


def test_mxfp4_experts_are_changed_on_request_only(tiny, expert_update, tmp_path):
    told = rf"adapters of 1 projections of MXFP4 experts \({W2}, …\).*ask for it with --experts"
    with pytest.raises(CheckpointError, match=told):
        merge(tiny.directory("tiny-k3"), expert_update(-2), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_merged(tiny, tmp_path):
    directory, config = tiny.directory("tiny-kimi-linear"), tiny("tiny-kimi-linear").config
    with pytest.raises(CheckpointError, match="holds no adapters: there is no adapter_config"):
        merge(directory, tmp_path, tmp_path / "out")
    spec = AdapterSpec((("lm_head", 1, 1.0),))
    arrays = {name: np.full(shape, np.nan, np.float32) for name, shape in half_shapes(config, spec).items()}
    write_adapters(tmp_path / "bad", config, spec, arrays)
    with pytest.raises(CheckpointError, match=r"the adapter array lm_head\.lora_A holds NaN or infinity"):
        merge(directory, tmp_path / "bad", tmp_path / "out")
    with pytest.raises(CheckpointError, match="is not empty; choose another directory"):
        merge(directory, tmp_path / "bad", tmp_path)
    assert not (tmp_path / "out").exists()


def test_scales_may_stand_before_codes(edited, expert_update, tmp_path):
    def turn(tensors):
        turned = sorted(tensors.items(), key=lambda item: item[0].endswith("weight_packed"))
        tensors.clear()
        tensors.update(turned)

    with pytest.raises(CheckpointError, match="less than 50% of the update"):
        merge(edited("tiny-k3", turn), expert_update(1e-3), tmp_path / "out", experts=True)
