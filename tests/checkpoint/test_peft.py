"""Adapters through the PEFT library: on transformers' own Kimi-Linear ours compute what they compute here.

PEFT, PyTorch and transformers are no dependency of the tests. Where this Python does not have them, KIMI_PEFT_PYTHON
may name one that does.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.adapters import adaptable_names, half_shapes, read_adapters, write_adapters
from kimi_jax.model.lora import AdapterSpec
from kimi_jax.model.model import flatten, nest

HERE = all(map(importlib.util.find_spec, ("torch", "transformers", "peft")))
PYTHON = os.environ.get("KIMI_PEFT_PYTHON") or (sys.executable if HERE else None)
pytestmark = pytest.mark.skipif(
    PYTHON is None,
    reason="PEFT, PyTorch and transformers are not installed, and KIMI_PEFT_PYTHON names no Python that has",
)
PROGRAM = Path(__file__).parent / "peft_program.py"
TOKENS = [[7, 300, 12, 511, 80, 81, 300, 12, 5, 90, 91, 2]]
TOLERANCE = {"rtol": 0, "atol": 2e-4}  # of logits up to about 10


def random_adapters(config, modules):
    spec = AdapterSpec(tuple(modules))
    rng = np.random.default_rng(3)
    arrays = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in half_shapes(config, spec).items()}
    return spec, arrays


def whole(config):
    """Every module but the routed experts, by kind with a rank and a scale of its own."""
    for name in adaptable_names(config):
        if ".experts." not in name:
            yield (name, 2, 2.0) if "shared_experts" in name else (name, 3, 0.5) if "_proj" in name else (name, 5, 1.0)


def some(config):
    """Modules of some layers: no name endings tell them from the rest."""
    for name in adaptable_names(config):
        layer = name.split(".")[1] if "." in name else ""
        if layer in ("0", "3", "5") and ("self_attn" in name or "shared_experts" in name or ".mlp." in name):
            yield (name, 4, 1.5) if layer == "3" else (name, 2, 1.0)


def experts(config):
    """Routed experts of all layers but one, of which layer 2 has another rank; and a module of another kind."""
    for name in adaptable_names(config):
        if ".experts." in name and ".4." not in name:
            yield (name, 3, 1.0) if ".2." in name else (name, 2, 0.5)
        elif name.endswith("q_proj"):
            yield name, 2, 1.0


@pytest.fixture(scope="module")
def model(tiny):
    """With all weights in float32, that other weights need no other compilation."""
    loaded = tiny("tiny-kimi-linear")
    return loaded.replace(params=jax.tree.map(lambda x: x.astype(jnp.float32), loaded.params))


@pytest.fixture(scope="module")
def ours(model, tmp_path_factory):
    """Folders with adapters of ours, and what is in them."""
    found = {}
    for modules in (whole, some, experts):
        folder = tmp_path_factory.mktemp("ours") / modules.__name__
        spec, arrays = random_adapters(model.config, modules(model.config))
        write_adapters(folder, model.config, spec, arrays)
        found[folder] = spec, arrays
    return found


@pytest.fixture(scope="module")
def peft(tiny, ours, tmp_path_factory):
    """What PEFT computed, and the folder of its own adapters."""
    place = tmp_path_factory.mktemp("peft")
    arguments = [tiny.directory("tiny-kimi-linear"), json.dumps(TOKENS), place / "theirs", place / "out.npz", *ours]
    command = [PYTHON, PROGRAM, *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(a) for a in command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for complaint in ("missing", "unexpected"):
        assert complaint not in done.stderr.lower(), done.stderr
    with np.load(place / "out.npz") as results:
        return dict(results), place / "theirs"


def logits(model):
    return np.asarray(kj.forward(model, jnp.asarray(TOKENS, jnp.int32)))


def merged(model, spec, arrays):
    """The model with its weights changed by the adapters: nothing new to compile."""
    params = dict(flatten(model.params))
    for name, _, scale in spec.modules:
        change = scale * arrays[f"{name}.lora_B"].astype(np.float64) @ arrays[f"{name}.lora_A"]
        params[f"{name}.weight"] = jnp.asarray(np.asarray(params[f"{name}.weight"], np.float64) + change, jnp.float32)
    return model.replace(params=nest(params))


def test_the_bare_models_agree(model, peft):
    np.testing.assert_allclose(logits(model), peft[0]["base"], **TOLERANCE)


def test_ours_attach_and_compute_the_same(model, ours, peft):
    for folder, (spec, arrays) in ours.items():
        fused = sum(name.endswith(".experts.w3") for name, _, _ in spec.modules)  # is one with w1
        assert peft[0][f"count:{folder}"] == len(spec.modules) - fused
        found = peft[0][str(folder)]
        assert np.abs(found - peft[0]["base"]).max() > 1
        np.testing.assert_allclose(logits(merged(model, spec, arrays)), found, **TOLERANCE)


def test_ours_compute_the_same_beside_the_weights(tiny, ours, peft):
    folder, (spec, _) = next(iter(ours.items()))
    adapted = kj.load_model(tiny.directory("tiny-kimi-linear"), dtype="float32", adapters=folder)
    assert adapted.spec.adapters == spec
    np.testing.assert_allclose(logits(adapted), peft[0][str(folder)], **TOLERANCE)


def test_theirs_are_read(model, peft):
    results, folder = peft
    spec, arrays = read_adapters(folder, model.config)
    kinds = {name.split(".", 2)[-1] for name, _, _ in spec.modules}
    assert kinds >= {"self_attn.f_a_proj", "block_sparse_moe.shared_experts.down_proj", "mlp.up_proj"}
    assert spec.by_name["layers.3.self_attn.q_proj"] == (7, 5 / 7**0.5)
    experts = "layers.1.block_sparse_moe.experts"
    assert {spec.by_name[f"{experts}.{name}"] for name in ("w1", "w2", "w3")} == {(3, 5 / 3**0.5)}
    assert spec.by_name["layers.1.block_sparse_moe.shared_experts.down_proj"] == (3, 2 / 3**0.5)
    assert np.abs(results["theirs"] - results["base"]).max() > 0.5
    np.testing.assert_allclose(logits(merged(model, spec, arrays)), results["theirs"], **TOLERANCE)
