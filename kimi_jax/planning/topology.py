"""The devices of a pod that is not there: its compiler, asked for by name.

TPU programs are compiled by the package `libtpu`, GPU programs by `jax-cuda13-plugin` and `jax-cuda13-pjrt` with
`ptxas` from `nvidia-cuda-nvcc`. Neither touches a device, or needs one.
"""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from kimi_jax.parallel.mesh import MESH_AXES
from kimi_jax.planning.pods import GPUFacts, Pod


class CompilerError(Exception):
    """A pod whose compiler is not installed or does not know the topology; the message says what to do."""


def pod_mesh(pod: Pod) -> Mesh:
    """The pod's mesh over devices that only a compiler knows.

    **Raises:** `CompilerError` where the compiler is not installed or refuses the topology.
    """
    devices = _tpu_devices(pod) if pod.platform == "tpu" else _gpu_devices(pod)
    if len(devices) != pod.devices:
        raise CompilerError(f"topology {pod.topology!r} has {len(devices)} devices, the pod's file says {pod.devices}")
    sizes = tuple(pod.mesh.get(name, 1) for name in MESH_AXES)
    grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def missing_compiler(platform: str) -> str | None:
    """What to install before programs for `platform` ("tpu" or "cuda") can be compiled; None where all is there."""
    if platform == "tpu":
        return None if _is_installed("libtpu") else "compiling for TPU needs libtpu: pip install 'jax[tpu]'"
    same = f"{{jax-cuda13-plugin,jax-cuda13-pjrt}}=={jax.__version__}"
    hint = f"compiling for GPU needs JAX's CUDA plugin and ptxas: pip install --no-deps {same} nvidia-cuda-nvcc"
    there = _is_installed("jax_plugins.xla_cuda13") and _is_installed("jax_cuda13_plugin")
    return None if there and _cuda_directory() is not None else hint


def compiler_options(pod: Pod, dump: Path) -> dict[str, Any]:
    """Options that make the compiler write the optimized program's text into `dump`, where it can be had only so.

    A TPU program's text cannot always be read back from the executable.
    """
    if pod.platform == "tpu":
        return {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    return {"xla_gpu_autotune_level": 0, "xla_gpu_cuda_data_dir": str(_cuda_directory())}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not there
        return False


def _check(platform: str) -> None:
    hint = missing_compiler(platform)
    if hint is not None:
        raise CompilerError(hint)


def _tpu_devices(pod: Pod) -> Sequence[Any]:
    _check("tpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # two processes may compile at the same time
    return _devices(pod, topology_name=pod.topology)


def _gpu_devices(pod: Pod) -> Sequence[Any]:
    _check("cuda")
    assert pod.gpu is not None
    _answer_cuda_for_gpu()
    jax.devices("cpu")  # starting JAX registers the plugins that are installed, without a GPU too
    return _devices(pod, topology=pod.topology, target_config=target_config(pod.gpu))


def _devices(pod: Pod, **how: str) -> Sequence[Any]:
    try:
        return topologies.get_topology_desc(platform=pod.platform, **how).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise CompilerError(f"the compiler for {pod.platform} refuses topology {pod.topology!r}: {first}") from None


def _answer_cuda_for_gpu() -> None:
    """Lets lowering rules for "gpu" apply although no GPU backend has started (JAX issue 23971)."""
    from jax._src import xla_bridge

    original = xla_bridge.canonicalize_platform
    if getattr(original, "answers_cuda", False):
        return

    def canonicalize_platform(platform: str) -> str:
        return "cuda" if platform == "gpu" else original(platform)

    canonicalize_platform.answers_cuda = True  # type: ignore[attr-defined]
    xla_bridge.canonicalize_platform = canonicalize_platform


def _cuda_directory() -> Path | None:
    """A CUDA toolkit with `bin/ptxas`: the wheel's, or the one on the path."""
    try:
        wheels = importlib.util.find_spec("nvidia")
    except ModuleNotFoundError:
        wheels = None
    for parent in wheels.submodule_search_locations or [] if wheels is not None else []:
        for place in sorted(Path(parent).glob("*/bin/ptxas")):
            return place.parents[1]
    found = shutil.which("ptxas")
    return None if found is None else Path(found).resolve().parents[1]


def target_config(gpu: GPUFacts) -> str:
    """The GPU's facts as the text of a `GpuTargetConfigProto`; limits of a block are the same from Hopper on."""
    major, _, minor = gpu.compute_capability.partition(".")
    accelerated = minor.endswith("a")
    capability = f"major: {major}"
    if int(minor.rstrip("a") or 0):
        capability += f" minor: {minor.rstrip('a')}"
    if accelerated:
        capability += " feature_extension: ACCELERATED_FEATURES"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: {gpu.cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth} l2_cache_size: {gpu.l2_bytes} clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 name: "{gpu.name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
device_description_str: "{gpu.name}"
"""
