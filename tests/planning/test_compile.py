"""Ahead-of-time compilation for TPU and GPU without one; where a compiler is not installed, those tests say so."""

import dataclasses
import json
import pickle

import jax
import numpy as np
import pytest
from jax.experimental import serialize_executable

from kimi_jax.cli.main import main
from kimi_jax.config import ModelConfig
from kimi_jax.inference.caches import init_cache
from kimi_jax.inference.functions import extend, prefill
from kimi_jax.model.model import nest
from kimi_jax.parallel.mesh import MeshError
from kimi_jax.planning import compile as ahead
from kimi_jax.planning import topology
from kimi_jax.planning.pods import Pod, find_pod


@pytest.fixture(scope="module")
def narrow():
    """Nine layers of K3's widths, with 64 experts."""
    config = ahead.first_layers(ModelConfig.from_file("kimi-k3"), 9)
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, num_experts=64))


def small_pod(name: str, topology: str) -> Pod:
    mesh = {**Pod.from_file(name).mesh, "data": 1, "tensor": 4}
    return dataclasses.replace(Pod.from_file(name), topology=topology, chips=4, devices=4, mesh=mesh)


@pytest.mark.parametrize(("name", "shape"), [("v5p-64chips", "v5p:2x2x1"), ("h200-16", "1x1x4")])
def test_nine_layers_of_k3(name, shape, narrow, tmp_path):
    pod = small_pod(name, shape)
    hint = topology.missing_compiler(pod.platform)
    if hint is not None:
        pytest.skip(hint)
    step = ahead.pod_step(pod, "decode", batch=8, context=1024, tokens=1)
    assert step == ahead.Step("decode", 8, 1, 1024)
    (found,) = ahead.compile_steps(narrow, pod, [step], tmp_path, "narrow")
    assert isinstance(found, ahead.Compiled)
    placed = ahead.argument_bytes(narrow, pod, step)
    # More: tokens, and a TPU's padding of small arrays. Less: layer 0 has a residual mix that nothing uses.
    assert 0.999 * placed < found.arguments < 1.05 * placed
    cache = found.aliased
    assert 0 < found.outputs - cache < 0.01 * found.outputs + 8 * 2**20  # all of the cache is donated; logits are not
    assert 0 < found.temporaries < 0.1 * found.arguments
    assert found.total == found.arguments + found.temporaries + found.outputs - found.aliased + found.code
    assert found.collectives["all-reduce"][0] >= 2 * narrow.num_layers - 2
    # Each of the 8 rows meets a device's share of the dense weights: about 2 operations a number.
    assert found.flops > 0.5 * 8 * 2 * 9 * 600e6 / 4
    if found.flops_once is not None:
        assert found.flops > found.flops_once
    assert found.bytes > 0.3 * found.arguments
    rounds = {loop.function: (loop.rounds, loop.source) for loop in found.loops}
    # On TPU a kernel reads the latents: `test_latent_kernel.py`.
    assert rounds.get("_attend") == (None if pod.platform == "tpu" else (4, "assumed"))
    assert "loop_product" not in rounds  # on both a kernel: `test_grouped_kernel.py`
    seconds, bound = ahead.roofline(pod, found)
    assert bound == "memory"
    assert seconds == found.bytes / pod.bandwidth
    assert found.saved is not None
    if not found.saved.startswith("not saved"):
        assert len(pickle.loads((tmp_path / f"narrow-{pod.name}-decode-8x1-1024.pickle").read_bytes())) == 3


def test_a_saved_executable_runs(tiny, tmp_path):
    model = tiny("tiny-kimi-linear")
    step = ahead.Step("decode", batch=2, tokens=1, context=256)
    compiled = extend.lower(model.spec, *ahead.step_arguments(model.spec, step)).compile()
    path = tmp_path / "new" / f"{step.name}.pickle"
    assert ahead.save_executable(compiled, path) == str(path)
    saved = pickle.loads(path.read_bytes())
    loaded = serialize_executable.deserialize_and_load(*saved, execution_devices=jax.devices()[:1])
    tokens, lengths = np.array([[5], [7]], np.int32), np.ones(2, np.int32)
    logits, cache = loaded(nest(model.params), tokens, lengths, init_cache(model, 2, 256))
    np.testing.assert_array_equal(cache.lengths, [1, 1])
    wanted, _ = prefill(model, tokens, lengths, init_cache(model, 2, 256))
    np.testing.assert_allclose(logits, wanted, atol=1e-5)


def test_what_cannot_fit_is_refused_before_compiling(monkeypatch):
    monkeypatch.setattr(ahead, "pod_mesh", lambda pod: pytest.fail("compiled"))
    eight = {**Pod.from_file("h200-16").mesh, "data": 1, "tensor": 8}
    pod = dataclasses.replace(Pod.from_file("h200-16"), chips=8, devices=8, mesh=eight)
    config = ModelConfig.from_file("kimi-k3")
    steps = [ahead.pod_step(pod, phase, None, None, 1024) for phase in ("prefill", "decode")]
    for found in ahead.compile_steps(config, pod, steps):
        assert isinstance(found, ahead.Refused)
        assert found.total > 1_560_000_000_000 / 8 > pod.hbm_bytes
        assert "nothing was compiled" in found.reason


def test_the_command_says_does_not_fit(tmp_path, capsys):
    text = find_pod("h200-16").read_text().replace("chips = 16", "chips = 8").replace("devices = 16", "devices = 8")
    path = tmp_path / "h200-8.toml"
    path.write_text(text.replace("data = 2", "data = 1").replace("1x2x8", "1x1x8"))
    assert main(["compile", "--pod", str(path), "--phase", "decode"]) == 1
    out, err = capsys.readouterr()
    assert "does not fit, 59.27 GB short: weights and cache alone" in out
    assert "nothing was compiled" in out
    assert err.endswith("kimi-jax: kimi-k3 (93 layers) on h200-8: decode does not fit\n")
    assert main(["compile", "--pod", str(path), "--json"]) == 1
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(step["step"]["phase"], step["fits"]) for step in steps] == [("prefill", False), ("decode", False)]
    assert [round(step["free"] / -1e9) for step in steps] == [55, 59]


@pytest.mark.parametrize(("pod", "package"), [("v5p-64chips", "jax[tpu]"), ("h200-16", "jax-cuda13-plugin")])
def test_a_missing_compiler_gives_the_line_that_installs_it(pod, package, monkeypatch, capsys):
    monkeypatch.setattr(topology, "_is_installed", lambda module: False)
    assert main(["compile", "--pod", pod, "--phase", "decode", "--layers", "4"]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("kimi-jax: compiling for ")
    assert "pip install" in err
    assert package in err


@pytest.mark.parametrize("options", [["--layers", "94"], ["--batch", "0"], ["--context", "-1"], ["--model", "kimi-k4"]])
def test_options_that_cannot_be_meant(options, capsys):
    assert main(["compile", "--pod", "v5p-64chips", *options]) == 2
    assert options[1] in capsys.readouterr().err


def test_a_batch_that_the_mesh_does_not_divide(narrow):
    pod = small_pod("v5p-64chips", "v5p:2x2x1")
    pod = dataclasses.replace(pod, mesh={**pod.mesh, "data": 4, "tensor": 1})
    with pytest.raises(MeshError, match="batch of 6"):
        next(iter(ahead.compile_steps(narrow, pod, [ahead.Step("decode", 6, 1, 1024)])))


def test_arguments_have_the_bytes_that_the_table_says():
    config = ModelConfig.from_file("tiny-k3")
    import kimi_jax as kj

    mesh = kj.make_mesh({"data": 2, "tensor": 4})
    spec = ahead.ModelSpec(config, mesh, jax.numpy.dtype(jax.numpy.bfloat16))
    step = ahead.Step("decode", 4, 1, 256)
    arrays = jax.tree.leaves(ahead.step_arguments(spec, step))
    sizes = [jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype) for x in arrays]
    total = sum(x.size * x.dtype.itemsize for x in sizes)
    pod = dataclasses.replace(Pod.from_file("v5p-64chips"), mesh=dict(mesh.shape), devices=8, chips=8)
    small = 4 * 4 + 4 * 4 + 2 * 4 + 4 * 4  # tokens, lengths, the cache's own lengths and identity
    assert total == ahead.argument_bytes(config, pod, step) + small


def test_target_config_of_gpus():
    h200, b300 = (topology.target_config(Pod.from_file(name).gpu) for name in ("h200-16", "b300-8"))
    assert "{ major: 9 feature_extension: ACCELERATED_FEATURES }" in h200
    assert "{ major: 10 minor: 3 }" in b300
    assert "device_memory_size: 151397597184" in h200
