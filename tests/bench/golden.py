"""Logits and greedy tokens of the tiny models on every mesh, with both expert strategies, with and without the loop.

    JAX_DISABLE_MOST_OPTIMIZATIONS=1 python tests/bench/golden.py [--models tiny-k3 tiny-k31] [--loop both]

The published code's outputs lie in `tests/golden`. Each line is one model loaded for a mesh and strategy: eight rows of
different lengths in one prefill, then the greedy continuation by prefill and decode. Exit code 1 where something is
outside the golden limits. A line takes half a minute to a minute on two cores, nearly all of it compiling (twice that
without the variable); the tests keep a few of them.
"""

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import tyro

import kimi_jax as kj

GOLDEN = Path(__file__).parent.parent / "golden"
MESHES = ({"data": 8}, {"context": 8}, {"tensor": 4}, {"data": 2, "context": 2, "tensor": 2})
WIDTH = 150


@dataclass(frozen=True)
class Bench:
    """Run the golden data on every mesh."""

    models: list[str] = field(default_factory=lambda: ["tiny-k3", "tiny-k31"])
    """Tiny checkpoints."""
    strategies: list[str] = field(default_factory=lambda: ["gather", "dispatch"])
    """Expert strategies."""
    loop: Literal["yes", "no", "both"] = "both"
    """Whether the layers that repeat run as a loop."""


def eight_rows(data: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Eight beginnings of the golden sequence, right-padded, and their lengths."""
    sequence = data["seq_input_ids"]
    lengths = np.asarray([len(sequence), 3, 64, 100, 1, 17, 65, 99])
    tokens = np.zeros((8, WIDTH), np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = sequence[:length]
    return tokens, lengths


def run(model: kj.Model, data: dict[str, np.ndarray]) -> tuple[float, float, bool]:
    """Largest difference of a logit, relative RMS, and whether every greedy token is the golden one."""
    tokens, lengths = eight_rows(data)
    logits, _ = kj.prefill(model, tokens, lengths, kj.init_cache(model, 8, 192))
    found, wanted = [np.asarray(logits)], [data["seq_logits"][lengths - 1]]
    prompt, new = data["greedy_prompt_ids"], data["greedy_new_ids"]
    tokens = np.zeros((8, WIDTH), np.int32)
    tokens[:, : len(prompt)] = prompt
    logits, cache = kj.prefill(model, tokens, [len(prompt)] * 8, kj.init_cache(model, 8, 192))
    equal = True
    for step, token in enumerate(new):
        found.append(np.asarray(logits))
        wanted.append(np.tile(data["greedy_logits"][step], (8, 1)))
        equal = equal and np.argmax(found[-1], axis=-1).tolist() == [token] * 8
        logits, cache = kj.decode(model, [int(token)] * 8, cache)
    got, want = np.concatenate(found), np.concatenate(wanted)
    rms = np.sqrt(np.mean(np.square(got - want)) / np.mean(np.square(want)))
    return float(np.max(np.abs(got - want))), float(rms), equal


def main(bench: Bench) -> None:
    """Prints a line a case."""
    jax.config.update("jax_num_cpu_devices", 8)
    failed = 0
    for name in bench.models:
        with np.load(GOLDEN / name / "golden.npz") as arrays:
            data = dict(arrays)
        directory = Path(kj.__file__).parent / "data" / name if name == "tiny-k3" else GOLDEN / name
        for mesh in MESHES:
            for strategy in bench.strategies:
                for loop in {"yes": (True,), "no": (False,), "both": (True, False)}[bench.loop]:
                    start = time.perf_counter()
                    model = kj.load_model(
                        directory, mesh=kj.make_mesh(mesh), dtype="float32", expert_strategy=strategy, loop=loop
                    )
                    largest, rms, equal = run(model, data)
                    good = equal and largest <= 2e-3 and rms <= 5e-5
                    failed += not good
                    where = " ".join(f"{axis}={size}" for axis, size in mesh.items())
                    print(
                        f"{name:9} {where:27} {strategy:8} {'loop' if loop else 'each':4}  largest {largest:.1e}  "
                        f"relative RMS {rms:.1e}  greedy {'equal' if equal else 'DIFFERENT'}  "
                        f"{time.perf_counter() - start:4.0f} s{'' if good else '  OUTSIDE THE LIMITS'}",
                        flush=True,
                    )
                    jax.clear_caches()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(tyro.cli(Bench))
