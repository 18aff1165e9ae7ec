"""`kimi-jax compile`: the compiled prefill and decode of a pod that is not there."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console

from kimi_jax.cli.output import CommandError, UsageError, console, print_table
from kimi_jax.config import ConfigError, ModelConfig, find_config
from kimi_jax.finetune.settings import FinetuneConfig, read_settings
from kimi_jax.planning.compile import (
    Compiled,
    Phase,
    Refused,
    compile_steps,
    first_layers,
    pod_step,
    roofline,
    training_step,
)
from kimi_jax.planning.pods import Pod, find_pod
from kimi_jax.planning.topology import CompilerError


@dataclass(frozen=True)
class Compile:
    """Compile a model's prefill and decode for a pod, without the pod; print what they take of each device.

    Exit code 1 where something does not fit, or the compiler's package is not installed.
    """

    pod: str
    """A shipped pod such as v5p-64chips, or a TOML file like it."""
    model: str = "kimi-k3"
    """A shipped name such as kimi-k3 or kimi-k3.1-pro, a config.json, or a checkpoint directory."""
    phase: Literal["decode", "prefill", "both"] = "both"
    """What to compile."""
    finetune: Path | None = None
    """Compile a step of fine-tuning with these settings (as in configs/finetune) in place of prefill and decode."""
    batch: int | None = None
    """Sequences decoded together. Default: the pod's."""
    context: int | None = None
    """Places of the cache, full when decoding. Default: the pod's."""
    tokens: int = 1024
    """Tokens of the prompt's piece that prefill adds to one row for each part of the mesh axis data."""
    layers: int | None = None
    """Compile only the first layers, with embedding and head: for a quick look."""
    dense_weights: Literal["bf16", "int8", "fp8"] = "bf16"
    """How weights that are not experts are kept: as in the checkpoint, or rounded to eight bits by output channel."""
    save: Path | None = None
    """A directory for the serialised executables, where the backend can write them."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        """Compiles and prints."""
        jax.config.update("jax_platforms", "cpu")  # this machine's own accelerators are not wanted
        try:
            pod, path = Pod.from_file(find_pod(self.pod)), find_config(self.model)
        except ConfigError as error:
            raise UsageError(str(error)) from None
        config = ModelConfig.from_file(path)
        for name in ("batch", "context", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} must be at least 1, found {value}")
        try:
            config = config if self.layers is None else first_layers(config, self.layers)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.finetune is not None:
            steps = [training_step(read_settings(self.finetune, FinetuneConfig))]
        else:
            phases: list[Phase] = ["prefill", "decode"] if self.phase == "both" else [self.phase]
            steps = [pod_step(pod, phase, self.batch, self.context, self.tokens) for phase in phases]
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        name = name if self.dense_weights == "bf16" else f"{name}-{self.dense_weights}"
        rounded = "" if self.dense_weights == "bf16" else f", dense weights in {self.dense_weights}"
        title = f"{self.model} ({config.num_layers} layers{rounded}) on {pod.name}"
        results = []
        print(f"{title}: compiling takes minutes", file=sys.stderr)
        try:
            for result in compile_steps(config, pod, steps, self.save, name, self.dense_weights):
                results.append(result)
                if not self.json:
                    _print(console(), title, pod, result)
        except CompilerError as error:
            raise CommandError(str(error)) from None
        if self.json:
            entries = [_as_json(pod, result) for result in results]
            described = {"model": self.model, "layers": config.num_layers, "dense_weights": self.dense_weights}
            print(json.dumps({**described, "pod": asdict(pod), "steps": entries}, indent=2))
        short = [result.step.phase for result in results if not _fits(pod, result)]
        if short:
            raise CommandError(f"{title}: {' and '.join(short)} {'does' if len(short) == 1 else 'do'} not fit")


def _fits(pod: Pod, result: Compiled | Refused) -> bool:
    return isinstance(result, Compiled) and result.total <= pod.hbm_bytes


def _as_json(pod: Pod, result: Compiled | Refused) -> dict[str, Any]:
    fits = {"fits": _fits(pod, result), "free": None if result.total is None else pod.hbm_bytes - result.total}
    if isinstance(result, Refused):
        return {**asdict(result), **fits}
    seconds, bound = roofline(pod, result)
    collectives = {kind: {"count": count, "bytes": size} for kind, (count, size) in result.collectives.items()}
    return {
        **asdict(result),
        "collectives": collectives,
        "total": result.total,
        **fits,
        "roofline_seconds": seconds,
        "bound_by": bound,
    }


def _verdict(pod: Pod, total: int) -> str:
    left = pod.hbm_bytes - total
    return f"fits, {left / 1e9:,.2f} GB left" if left >= 0 else f"does not fit, {-left / 1e9:,.2f} GB short"


def _billions(number: float | None) -> str:
    return "not told" if number is None else f"{number / 1e9:,.2f}"


def _print(out: Console, title: str, pod: Pod, result: Compiled | Refused) -> None:
    step = result.step
    work = f"{step.phase} of {step.batch} x {step.tokens:,} tokens"
    work += "" if step.phase == "train" else f", cache of {step.context:,}"
    if isinstance(result, Refused):
        size = "" if result.total is None else f"{_verdict(pod, result.total)}: "
        out.print(f"{title}, {work}: {size or 'does not fit: '}{result.reason}", soft_wrap=True, markup=False)
        return
    held = "adapters, optimizer" if step.phase == "train" else "cache"
    print_table(
        out,
        f"{title}, {work}: {_verdict(pod, result.total)}",
        ("one device", "bytes"),
        [
            (f"arguments: weights, {held}, tokens", result.arguments),
            ("temporaries", result.temporaries),
            ("outputs", result.outputs),
            ("aliased: outputs in the arguments' memory", result.aliased),
            ("program", result.code),
            ("total", result.total),
            ("memory", pod.hbm_bytes),
        ],
    )
    rows = [(kind, round(count), round(size)) for kind, (count, size) in result.collectives.items()]
    print_table(out, "Collectives of a call", ("kind", "operations", "bytes a device"), rows)
    loops = [(x.function, x.loops, f"{x.rounds:,.1f}", x.source) for x in result.loops]
    print_table(out, "Loops; unknown rounds count once", ("function", "loops", "rounds", "which are"), loops)
    seconds, bound = roofline(pod, result)
    rate = f"{step.batch * step.tokens / seconds:,.0f} tokens/s"
    print_table(
        out,
        "Work of a call and device",
        ("what", "number"),
        [
            ("GFLOP, loop bodies once (XLA's count)", _billions(result.flops_once)),
            ("GFLOP of matrix products, every round", _billions(result.flops)),
            ("GB moved, loop bodies once (XLA's count, with on-chip copies)", _billions(result.bytes_once)),
            ("GB of HBM read and written, every round", _billions(result.bytes)),
            (
                f"roofline, bound by {bound}",
                f"{1e3 * seconds:,.2f} ms, {rate}",
            ),
            ("tracing and lowering", f"{result.lower_seconds:,.1f} s"),
            ("compiling", f"{result.compile_seconds:,.1f} s, {result.compile_cpu_seconds:,.1f} s of processor time"),
        ],
    )
    if result.saved is not None:
        out.print(f"executable: {result.saved}", soft_wrap=True, markup=False)
