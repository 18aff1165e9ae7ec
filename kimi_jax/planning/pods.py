"""Pods: a machine, the mesh laid over it, and the batch it decodes, read from `configs/pods/*.toml`."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kimi_jax.config import ConfigError, shipped_directory
from kimi_jax.parallel.mesh import MESH_AXES
from kimi_jax.planning.devices import DEVICES, Device

_PLATFORMS = ("tpu", "cuda")


@dataclass(frozen=True)
class GPUFacts:
    """What the GPU compiler must know of a GPU that is not there, as its driver reports it.

    - `compute_capability`: like "10.3"; a final "a" stands for the architecture's accelerated features.
    - `memory` in bytes, `bandwidth` in bytes a second.
    """

    name: str
    compute_capability: str
    cores: int
    clock_ghz: float
    l2_bytes: int
    memory: int
    bandwidth: int


@dataclass(frozen=True)
class Pod:
    """A machine and how K3 runs on it.

    - `kind`: the device's name in `kimi_jax.planning.devices`.
    - `platform`: "tpu" or "cuda". `topology`: as that platform's compiler names it ("v5p:4x4x4"; GPUs:
        partitions x hosts x GPUs a host).
    - `chips`, `devices`: what is bought, and what JAX sees (tpu7x has two devices a chip).
    - `hbm_bytes`, `bandwidth`: of one JAX device; bytes, and bytes a second. 1 GB = 10⁹ bytes.
    - `cloud_name`: what clouds call the machine.
    - `mesh`: size of every mesh axis; their product is `devices`.
    - `batch`, `context`: sequences, and tokens that each of them holds, for decoding.
    - `gpu`: facts for the GPU compiler, None for TPUs.
    """

    name: str
    kind: str
    platform: Literal["tpu", "cuda"]
    topology: str
    chips: int
    devices: int
    hbm_bytes: int
    bandwidth: int
    cloud_name: str
    mesh: Mapping[str, int]
    batch: int
    context: int
    gpu: GPUFacts | None = None

    @property
    def device(self) -> Device:
        """One chip of it."""
        per_chip = self.devices // self.chips
        peak = next((device.peak_flops for device in DEVICES if device.name == self.kind), None)
        return Device(self.kind, self.hbm_bytes * per_chip, self.bandwidth * per_chip, peak, per_chip)

    @classmethod
    def from_file(cls, source: str | Path) -> "Pod":
        """Reads a pod.

        **Arguments:**

        - `source`: a TOML file, or the name of a shipped one such as `v5p-64chips` (see `shipped_pods`).

        **Raises:** `ConfigError` naming the file, the field and the value found.
        """
        path = find_pod(source)
        try:
            return _read(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not a TOML file: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def pod_directory() -> Path:
    """Directory of the shipped pods."""
    return shipped_directory().parent / "pods"


def shipped_pods() -> tuple[str, ...]:
    """Names that `Pod.from_file` accepts in place of a path."""
    return tuple(sorted(path.stem for path in pod_directory().glob("*.toml")))


def find_pod(source: str | Path) -> Path:
    """The TOML file that `source` (a file or a shipped name) stands for; `ConfigError` where there is none."""
    path = Path(source)
    if path.is_file():
        return path
    shipped = pod_directory() / f"{source}.toml"
    if path.name == str(source) and shipped.is_file():
        return shipped
    raise ConfigError(f"{source} is neither a file nor a shipped pod ({', '.join(shipped_pods())})")


class _Table:
    """Typed access to one TOML table that must hold exactly the fields asked for."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self.left = dict(raw)
        self.prefix = prefix

    def _take(self, name: str, kinds: tuple[type, ...], what: str) -> Any:
        if name not in self.left:
            raise ConfigError(f"field '{self.prefix}{name}' is missing")
        value = self.left.pop(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(f"field '{self.prefix}{name}' must be {what}, found {value!r}")
        return value

    def count(self, name: str) -> int:
        value = self._take(name, (int,), "a whole number")
        if value < 1:
            raise ConfigError(f"field '{self.prefix}{name}' must be at least 1, found {value}")
        return int(value)

    def positive(self, name: str) -> float:
        value = float(self._take(name, (int, float), "a number"))
        if not 0 < value < math.inf:
            raise ConfigError(f"field '{self.prefix}{name}' must be a positive number, found {value}")
        return value

    def text(self, name: str) -> str:
        value = self._take(name, (str,), "a string")
        if not value:
            raise ConfigError(f"field '{self.prefix}{name}' must not be empty, found {value!r}")
        return str(value)

    def table(self, name: str) -> "_Table":
        return _Table(self._take(name, (dict,), "a table"), f"{self.prefix}{name}.")

    def end(self) -> None:
        for name, value in self.left.items():
            raise ConfigError(f"field '{self.prefix}{name}' = {value!r} is not known")


def _read(name: str, raw: Mapping[str, Any]) -> Pod:
    top = _Table(raw)
    kind, platform = top.text("kind"), top.text("platform")
    if platform not in _PLATFORMS:
        raise ConfigError(f"field 'platform' must be {' or '.join(map(repr, _PLATFORMS))}, found {platform!r}")
    chips, devices = top.count("chips"), top.count("devices")
    if devices % chips:
        raise ConfigError(f"field 'devices' must be a multiple of the {chips} chips, found {devices}")
    decode = top.table("decode")
    pod = Pod(
        name=name,
        kind=kind,
        platform="tpu" if platform == "tpu" else "cuda",
        topology=top.text("topology"),
        chips=chips,
        devices=devices,
        hbm_bytes=top.count("hbm_bytes"),
        bandwidth=top.count("bandwidth"),
        cloud_name=top.text("cloud_name"),
        mesh=_read_mesh(top.table("mesh"), devices),
        batch=decode.count("batch"),
        context=decode.count("context"),
        gpu=_read_gpu(top.table("gpu")) if platform == "cuda" else None,
    )
    decode.end()
    top.end()
    return pod


def _read_mesh(table: _Table, devices: int) -> dict[str, int]:
    sizes = {name: table.count(name) for name in tuple(table.left)}
    for name, size in sizes.items():
        if name not in MESH_AXES and size > 1:  # an axis of size 1 says nothing
            raise ConfigError(f"field 'mesh.{name}' = {size} is no mesh axis; the axes are {', '.join(MESH_AXES)}")
    if math.prod(sizes.values()) != devices:
        product = " × ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(f"field 'mesh' must have {devices} devices, found {product}")
    return {name: sizes.get(name, 1) for name in MESH_AXES}


def _read_gpu(table: _Table) -> GPUFacts:
    facts = GPUFacts(
        name=table.text("name"),
        compute_capability=table.text("compute_capability"),
        cores=table.count("cores"),
        clock_ghz=table.positive("clock_ghz"),
        l2_bytes=table.count("l2_bytes"),
        memory=table.count("memory"),
        bandwidth=table.count("bandwidth"),
    )
    table.end()
    return facts
