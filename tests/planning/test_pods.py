"""Pods and devices: the shipped files say what the machines are, and a wrong file is named with field and value."""

import math
import re

import pytest

from kimi_jax.config import ConfigError, ModelConfig
from kimi_jax.planning.devices import DEVICES, find_device
from kimi_jax.planning.memory import place
from kimi_jax.planning.pods import Pod, find_pod, shipped_pods

NAMES = ("b300-8", "gb300-8", "h200-16", "tpu7x-16chips", "v5p-128chips", "v5p-64chips", "v6e-128chips")
HOSTS = ("h200-8", "v5p-4chips")
"""Single hosts, for Kimi-Linear-48B."""


def test_shipped_pods():
    assert shipped_pods() == tuple(sorted(NAMES + HOSTS))


@pytest.mark.parametrize("name", NAMES + HOSTS)
def test_a_shipped_pod_says_what_the_machine_is(name):
    pod = Pod.from_file(name)
    device = find_device(pod.kind)
    assert pod.device == device
    assert (pod.name, pod.devices) == (name, pod.chips * device.jax_devices)
    chips = f"-{pod.chips}chips" if pod.platform == "tpu" else f"-{pod.chips}"
    assert name == pod.kind.lower() + chips
    assert math.prod(int(size) for size in pod.topology.split(":")[-1].split("x")) == pod.chips
    assert (pod.gpu is None) == (pod.platform == "tpu")
    lines = find_pod(name).read_text().splitlines()
    model = "--model kimi-linear-48b " if name in HOSTS else ""
    assert lines[0] == f"# kimi-jax compile {model}--pod configs/pods/{name}.toml"


def test_values_of_pods():
    v5p = Pod.from_file("v5p-64chips")
    assert (v5p.topology, v5p.hbm_bytes, v5p.bandwidth) == ("v5p:4x4x4", 95 * 10**9, 2_770 * 10**9)
    assert "v5p-128" in v5p.cloud_name
    assert (v5p.batch, v5p.context) == (64, 8192)
    tpu7x = Pod.from_file("tpu7x-16chips")
    assert (tpu7x.chips, tpu7x.devices, tpu7x.hbm_bytes) == (16, 32, 96 * 10**9)
    assert Pod.from_file("h200-16").gpu.compute_capability == "9.0a"


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, model) for name in NAMES for model in ("kimi-k3", "kimi-k3.1-pro")]
    + [(name, "kimi-linear-48b") for name in HOSTS],
)
def test_the_batch_of_a_shipped_pod_fits(name, model):
    pod = Pod.from_file(name)
    placement = place(ModelConfig.from_file(model), pod.mesh, pod.context)
    assert pod.batch % placement.groups == 0
    assert placement.total(pod.batch // placement.groups) <= pod.hbm_bytes


def test_v5p_64chips_decodes_in_60_gb():
    pod = Pod.from_file("v5p-64chips")
    placement = place(ModelConfig.from_file("kimi-k3"), pod.mesh, pod.context)
    assert placement.total(pod.batch // placement.groups) <= 60 * 10**9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "B300"', "", "field 'kind' is missing"),
        ('kind = "B300"', 'kind = ""', "field 'kind' must not be empty, found ''"),
        ('platform = "cuda"', 'platform = "rocm"', "field 'platform' must be 'tpu' or 'cuda', found 'rocm'"),
        ('platform = "cuda"', 'platform = "tpu"', r"field 'gpu' = \{.*\} is not known"),
        ("chips = 8", "chips = 0", "field 'chips' must be at least 1, found 0"),
        ("chips = 8", "chips = 3", "field 'devices' must be a multiple of the 3 chips, found 8"),
        ("devices = 8", "devices = true", "field 'devices' must be a whole number, found True"),
        ("hbm_bytes = 288_000_000_000", 'hbm_bytes = "8GB"', "field 'hbm_bytes' must be a whole number, found '8GB'"),
        ("tensor = 8", "tensor = 4", "field 'mesh' must have 8 devices, found data=1 × context=1 × tensor=4"),
        ("tensor = 8", "tensor = 2\nexpert = 4", "field 'mesh.expert' = 4 is no mesh axis; the axes are data"),
        ("batch = 32", "batch = 0", "field 'decode.batch' must be at least 1, found 0"),
        ("batch = 32", "batch = 32\ntokens = 5", "field 'decode.tokens' = 5 is not known"),
        ("clock_ghz = 1.965", "clock_ghz = inf", "field 'gpu.clock_ghz' must be a positive number, found inf"),
        ("clock_ghz = 1.965", "clock_ghz = 1.965\nfans = 2", "field 'gpu.fans' = 2 is not known"),
        ("[mesh]", "mesh = 8\n[other]", "field 'mesh' must be a table, found 8"),
        ("[mesh]", "[mesh", "is not a TOML file"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_with_field_and_value(tmp_path, old, new, message):
    text = find_pod("b300-8").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}.*{message}"):
        Pod.from_file(path)


def test_a_pod_that_is_not_there():
    with pytest.raises(ConfigError, match=r"v4-8 is neither a file nor a shipped pod .*v5p-64chips"):
        Pod.from_file("v4-8")


def test_device_names():
    assert find_device("b300") == find_device("NVIDIA B300") == find_device("B300", 288 * 10**9)
    assert find_device("TPU v5p").memory == 95 * 10**9
    assert find_device("tpu7x").jax_devices == 2
    assert len({device.name.casefold() for device in DEVICES}) == len(DEVICES)
    assert find_device("B300", 270 * 10**9).bandwidth == 8 * 10**12
    assert find_device("MI355X", 288 * 10**9).bandwidth is None


def test_a_device_that_is_not_known():
    with pytest.raises(ValueError, match=r"device 'B9' is not known \(v5p, .*GB300\); give its memory too"):
        find_device("B9")
    with pytest.raises(ValueError, match="device 'B300': the memory must be at least 1 byte, found 0"):
        find_device("B300", 0)
