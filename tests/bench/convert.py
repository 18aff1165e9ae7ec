"""The rate of `kimi-jax convert` against `cp` of the same bytes, and its peak memory.

    python tests/bench/convert.py --scratch DIR [--experts 224] [--layers 3] [--max-memory 16GB]

Synthesizes a checkpoint of K3's widths (10.5 GB by default, its largest array over 1.2 GB), drops it from the page
cache before each step, and needs three times its size on the disk of DIR: nothing is removed before the end, for a
disk may be busy with that for a while.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from kimi_jax.config import find_config


@dataclass(frozen=True)
class Bench:
    """Measure the converter."""

    scratch: Path
    """A directory for the checkpoints; they are removed in the end."""
    experts: int = 224
    """Routed experts a layer; 224 of K3's width make arrays of 1.23 GB."""
    layers: int = 3
    """Layers, all but the first with experts."""
    max_memory: str = "16GB"
    """Given to the converter."""


def configuration(experts: int, layers: int) -> dict[str, object]:
    """K3 with fewer experts, layers and tokens."""
    raw = json.loads(find_config("kimi-k3").read_text())
    raw.pop("vision_config")
    text = raw["text_config"]
    text |= {"num_hidden_layers": layers, "num_experts": experts, "vocab_size": 8192}
    text["linear_attn_config"] |= {"kda_layers": list(range(1, layers)), "full_attn_layers": [layers]}
    for ids in (raw, text):
        ids |= {key: 1 for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in ids}
    return raw


def timed(step: Callable[[], object], source: Path) -> float:
    """Seconds of a step that finds `source` out of the page cache."""
    os.sync()
    for path in source.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def command(*arguments: str) -> None:
    """Runs `kimi-jax` in a process of its own."""
    subprocess.run([sys.executable, "-m", "kimi_jax.cli.main", *arguments], check=True)


def main(bench: Bench) -> None:
    """Measures and prints a table."""
    root = bench.scratch / "convert-bench"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    source, copied, converted = root / "source", root / "copied", root / "converted"
    (root / "config.json").write_text(json.dumps(configuration(bench.experts, bench.layers)))
    command("synthesize", str(root / "config.json"), str(source), "--file-size", "2GB")
    size = sum(path.stat().st_size for path in source.iterdir())

    def copy() -> None:
        shutil.copytree(source, copied, copy_function=lambda a, b: subprocess.run(["cp", a, b], check=True))

    copy_seconds = timed(copy, source)
    start = time.perf_counter()
    os.sync()
    sync_seconds = time.perf_counter() - start
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    seconds = timed(lambda: command("convert", str(source), str(converted), "--max-memory", bench.max_memory), source)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    verify_seconds = timed(lambda: command("verify", str(converted)), source)
    print(f"source                {size / 1e9:8.2f} GB")
    for name, taken in (
        ("cp", copy_seconds),
        ("cp and sync", copy_seconds + sync_seconds),
        ("convert", seconds),
        ("verify", verify_seconds),
    ):
        print(f"{name:<20}  {taken:8.1f} s  {size / taken / 1e9:6.3f} GB/s")
    print(f"convert / cp          {copy_seconds / seconds:8.2f}")
    print(f"convert / (cp, sync)  {(copy_seconds + sync_seconds) / seconds:8.2f}")
    print(f"peak memory           {peak / 1e6:8.2f} GB{'' if peak > before else ' or less (synthesize took as much)'}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main(tyro.cli(Bench))
