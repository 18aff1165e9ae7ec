"""`kimi-jax plan`: will it fit, how many conversations go with it, and how fast can it be?"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from kimi_jax.cli.output import UsageError, console, parse_bytes, print_table
from kimi_jax.config import ConfigError, ModelConfig, find_config
from kimi_jax.parallel.mesh import MeshError, parse_mesh
from kimi_jax.planning.devices import Device, find_device
from kimi_jax.planning.memory import check_axes
from kimi_jax.planning.plan import MachinePlan, plan
from kimi_jax.planning.pods import Pod, find_pod


@dataclass(frozen=True)
class Plan:
    """Will a model fit a machine, with how many conversations, and how fast can it decode at best? Needs no device.

    The machine is --device and --count, or --pod. 1 GB is 10^9 bytes. Exit code 0 also where the model does not fit:
    that is an answer.
    """

    model: str = "kimi-k3"
    """A shipped name such as kimi-k3 or kimi-k3.1-pro, a config.json, or a checkpoint directory."""
    device: str | None = None
    """The chip: v5p, v6e, TPU7x, H200, B200, B300 or GB300, with another memory if you like ("B300 270GB"); any other
    name needs its memory ("MI355X 288GB")."""
    count: int | None = None
    """Chips of the machine."""
    pod: str | None = None
    """A shipped pod such as v5p-64chips, or a TOML file like it, in place of --device and --count; its mesh, batch and
    context are used where --mesh, --batch and --context are not given."""
    context: int | None = None
    """Tokens of a conversation. Default: the model's limit (1048576 for K3)."""
    batch: int | None = None
    """Sequences decoded together: what the mesh is asked to hold, and one more row of the roofline."""
    mesh: str | None = None
    """JAX devices by axis, e.g. data=2,tensor=4 (TPU7x has two a chip). Default: the mesh that holds most
    conversations."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        """Prints the plan."""
        try:
            config_path = find_config(self.model)
            pod = None if self.pod is None else find_pod(self.pod)
            mesh: Mapping[str, int] | None = parse_mesh(self.mesh)
            check_axes(mesh or {})
        except (ConfigError, MeshError) as error:
            raise UsageError(str(error)) from None
        config = ModelConfig.from_file(config_path)
        device, count, context, batch = self.device, self.count, self.context, self.batch
        try:
            if pod is not None:
                if device is not None or count is not None:
                    raise UsageError("give the machine once: --pod, or --device and --count")
                found = Pod.from_file(pod)
                chip, count, mesh = found.device, found.chips, mesh or found.mesh
                context = found.context if context is None else context
                batch = found.batch if batch is None else batch
            elif device is None or count is None:
                raise UsageError('give the machine: --device "B300 288GB" --count 8, or --pod v5p-64chips')
            else:
                chip = _device(device)
            found_plan = plan(config, chip, count, context, mesh, batch)
        except (ConfigError, MeshError):
            raise
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.json:
            print(json.dumps(_as_json(self.model, found_plan), indent=2))
        else:
            _print(console(), self.model, found_plan)


def _device(text: str) -> Device:
    """`"B300"` or `"B300 288GB"`; the last number with a unit is the memory."""
    found = re.fullmatch(r"(.*\S)\s+([\d.]+\s*[KMGT]i?B)", text.strip(), re.IGNORECASE)
    return find_device(text.strip()) if found is None else find_device(found[1], parse_bytes(found[2]))


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def _roofline(found: MachinePlan) -> list[dict[str, Any]]:
    rows = []
    for step in found.steps:
        seconds, bound = step.seconds(found.device, found.count)
        rate = {"bytes": step.bytes, "seconds": seconds, "tokens_per_second": step.batch / seconds, "bound_by": bound}
        rows.append({**asdict(step), **rate, "fits": found.fits(step.batch)})
    return rows


def _as_json(model: str, found: MachinePlan) -> dict[str, Any]:
    paper, placement, rows = found.paper, found.placement, found.rows
    return {
        "model": model,
        "device": asdict(found.device),
        "count": found.count,
        "context": found.context,
        "batch": found.batch,
        "on_paper": {**asdict(paper), "free": paper.free, "conversations": paper.conversations},
        "with_mesh": {
            "mesh": dict(placement.mesh),
            "weights": dict(placement.weights),
            "weight_bytes": placement.weight_bytes,
            "copied_bytes_all_devices": placement.copied,
            "conversation_bytes": placement.conversation,
            "conversations_held": rows * placement.groups,
            "temporary_bytes": placement.temporaries(rows),
            "total_bytes": placement.total(rows),
            "device_memory": found.device_memory,
            "free": found.device_memory - placement.total(rows),
            "conversations": found.conversations,
        },
        "smallest": [
            {"device": small.device.name, "on_paper": small.on_paper, "with_mesh": small.with_mesh, "mesh": small.mesh}
            for small in found.smallest
        ],
        "roofline": None if found.device.bandwidth is None else _roofline(found),
    }


def _print(out: Console, model: str, found: MachinePlan) -> None:
    paper, placement, rows = found.paper, found.placement, found.rows
    machine = f"{found.count} x {found.device.name}"
    conversation = f"conversation of {found.context:,} tokens"
    vision = "" if placement.config.vision is None else ", with the vision tower"
    lacking = f": the weights are {-paper.free:,} bytes too large" if paper.free < 0 else ""
    print_table(
        out,
        f"{model} on {machine}, on paper: {_fit(paper.conversations)}{lacking}",
        ("what", "bytes"),
        [
            ("memory in all", paper.memory),
            (f"checkpoint{vision}", paper.checkpoint_bytes),
            ("left by it", paper.free),
            (f"a {conversation}", paper.conversation_bytes),
        ],
    )
    held = rows * placement.groups
    left = found.device_memory - placement.total(rows)
    short = f", {-left:,} bytes a device too few for {held:,}" if left < 0 else ""
    print_table(
        out,
        f"With the mesh {_mesh_text(placement.mesh)}: {_fit(found.conversations)}{short}",
        ("one JAX device", "bytes"),
        [
            ("memory", found.device_memory),
            *((f"weights {how}", size) for how, size in placement.weights.items()),
            (f"its part of {_number(held, conversation)}", rows * placement.conversation),
            ("allowance for temporaries", placement.temporaries(rows)),
            ("total", placement.total(rows)),
            ("left by it", left),
            ("on all devices: copies of weights beyond the first", placement.copied),
        ],
    )
    print_table(
        out,
        f"Smallest machines that hold the weights and one {conversation}",
        ("chip", "on paper", "with mesh", "mesh"),
        [
            (
                small.device.name,
                *("none" if count is None else f"{count:,}" for count in (small.on_paper, small.with_mesh)),
                "" if small.mesh is None else _mesh_text(small.mesh),
            )
            for small in found.smallest
        ],
    )
    if found.device.bandwidth is None:
        out.print(f"No roofline: the bandwidth of {found.device.name} is not known", soft_wrap=True, markup=False)
        return
    print_table(
        out,
        f"At best: bytes of a decode step at {found.context:,} tokens each, over the bandwidth of {machine}",
        ("batch", "tokens/s", "ms a step", "bound by", "bytes", "dense weights", "experts", "touched", "states",
         "cache", "fits"),
        [
            (
                row["batch"],
                f"{row['tokens_per_second']:,.1f}",
                f"{1e3 * row['seconds']:,.3f}",
                row["bound_by"],
                row["bytes"],
                row["dense_bytes"],
                row["expert_bytes"],
                f"{row['touched']:.1%}",
                row["state_bytes"],
                row["cache_bytes"],
                row["fits"],
            )
            for row in _roofline(found)
        ],
    )  # fmt: skip


def _number(count: int, what: str) -> str:
    return f"{count:,} {what.replace('conversation', 'conversations') if count > 1 else what}"


def _fit(conversations: int) -> str:
    if conversations == 0:
        return "no conversation fits"
    return f"{_number(conversations, 'conversation')} fit{'s' if conversations == 1 else ''}"
