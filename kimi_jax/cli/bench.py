"""`kimi-jax bench` and `kimi-jax warmup`: how fast a checkpoint runs here, and compiling for it beforehand."""

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from kimi_jax.checkpoint.load import declared_model
from kimi_jax.cli.bundled import find_checkpoint
from kimi_jax.cli.compilation_cache import compilation_cache
from kimi_jax.cli.job import JobFlags, job_mesh, mesh_shape
from kimi_jax.cli.model_flags import ModelFlags
from kimi_jax.cli.output import UsageError, console, emit, print_table, remark
from kimi_jax.config import ModelConfig
from kimi_jax.inference.arguments import BUCKETS, bucket, cache_room
from kimi_jax.inference.functions import extend
from kimi_jax.inference.generate import PREFILL_PIECE
from kimi_jax.planning.compile import Step, step_arguments
from kimi_jax.planning.measure import DECODED, bandwidth, floor_bytes, measure_decode, measure_prefill, time_by_part


@dataclass(frozen=True)
class Bench(ModelFlags):
    """Measure a checkpoint on this machine: prompts by length, decoding by batch and filled cache, time by part.

    The floor of a decode step is what it must move (weights it uses, KDA state twice, filled cache once) over the
    bandwidth that one large array reaches here.
    """

    directory: tyro.conf.Positional[Path]
    """A Hugging Face or converted checkpoint directory, or tiny-k3 or demo-k3 for a bundled one."""
    prompt: tuple[int, ...] = (128, 1024)
    """Lengths of prompts, in tokens; one prompt a part of the mesh axis data."""
    batch: tuple[int, ...] = (1, 8)
    """Rows decoded together; the mesh axis data must divide them."""
    context: tuple[int, ...] | None = None
    """Tokens that each row of the cache holds when decoding. Default: 256 and 4096, as far as the model holds them."""
    profile: Path | None = None
    """Keep the profiles here, to be opened with xprof."""
    json: bool = False
    """Print one JSON object instead of tables."""
    job: Annotated[JobFlags, tyro.conf.arg(name="")] = field(default_factory=JobFlags)
    """Several processes that run this together."""

    def run(self) -> None:
        """Loads, measures, prints."""
        directory = find_checkpoint(self.directory)
        config = ModelConfig.from_file(directory)
        contexts = self.context
        if contexts is None:
            contexts = tuple(n for n in (256, 4096) if n + DECODED <= config.max_positions) or (1,)
        for name, values in (("prompt", self.prompt), ("batch", self.batch), ("context", contexts)):
            if not values or min(values) < 1:
                raise UsageError(f"--{name} wants numbers of at least 1, found {' '.join(map(str, values)) or 'none'}")
        longest = max(max(self.prompt), max(contexts) + DECODED)
        if longest > config.max_positions:
            raise UsageError(f"prompts and contexts reach {longest} tokens, the model has {config.max_positions}")
        shape = mesh_shape(self.mesh)
        mesh = job_mesh(self.job.start(config, asdict(replace(self, job=JobFlags(), profile=None))), shape)
        ways = 1 if mesh is None else mesh.shape["data"]
        uneven = [rows for rows in self.batch if rows % ways]
        if uneven:
            raise UsageError(f"--batch {uneven[0]} cannot be split over data={ways}")
        model = self.load(directory, mesh)
        rate = bandwidth(model)
        prefills, decodes = [], []
        for length in self.prompt:
            remark(f"prompts of {length} tokens")
            prefills.append(measure_prefill(model, length))
        for rows in self.batch:
            for context in contexts:
                remark(f"decoding {rows} rows of {context} tokens")
                floor = floor_bytes(model, rows, context)
                decodes.append((measure_decode(model, rows, context), floor, floor / rate))
        remark("profiling")
        keep = {name: None if self.profile is None else self.profile / name for name in ("prefill", "decode")}
        rows = max(self.batch)
        parts = {
            f"prompt of {max(self.prompt)}": time_by_part(model, ways, 0, max(self.prompt), keep["prefill"]),
            f"decoding {rows} of {max(contexts)}": time_by_part(model, rows, max(contexts), 1, keep["decode"]),
        }
        if self.json:
            emit(json.dumps(_report(self, rate, prefills, decodes, parts), indent=2))
            return
        out = console()
        device = jax.devices()[0].device_kind
        out.print(f"{directory} on {1 if mesh is None else mesh.size} × {device}, {self.dtype}, ", end="")
        out.print(f"dense weights {self.dense_weights}; memory {rate / 1e9:,.1f} GB/s\n")
        print_table(
            out,
            "Prompts",
            ("rows", "tokens", "ms", "tokens/s"),
            [
                (x.batch, x.tokens // x.batch, f"{1e3 * x.seconds:,.1f}", f"{x.tokens_per_second:,.1f}")
                for x in prefills
            ],
        )
        print_table(
            out,
            "Decoding",
            ("rows", "cached tokens", "ms a step", "tokens/s", "GB to move", "floor ms", "share of the floor"),
            [
                (
                    x.batch,
                    x.context,
                    f"{1e3 * x.seconds:,.2f}",
                    f"{x.tokens_per_second:,.1f}",
                    f"{size / 1e9:,.3f}",
                    f"{1e3 * least:,.2f}",
                    f"{least / x.seconds:.0%}",
                )
                for x, size, least in decodes
            ],
        )
        for title, found in parts.items():
            whole = sum(found.values())
            lines = [(name, f"{1e3 * took:,.2f}", f"{took / whole:.0%}") for name, took in found.items()]
            print_table(out, f"Time by part, {title}", ("part", "ms", "share"), lines)


def _report(bench: Bench, rate: float, prefills: Any, decodes: Any, parts: Any) -> dict[str, Any]:
    return {
        "directory": str(bench.directory),
        "mesh": bench.mesh,
        "dtype": bench.dtype,
        "dense_weights": bench.dense_weights,
        "device": jax.devices()[0].device_kind,
        "bytes_per_second": rate,
        "prefill": [asdict(x) | {"tokens_per_second": x.tokens_per_second} for x in prefills],
        "decode": [
            asdict(x) | {"tokens_per_second": x.tokens_per_second, "floor_bytes": size, "floor_seconds": least}
            for x, size, least in decodes
        ],
        "seconds_by_part": parts,
    }


@dataclass(frozen=True)
class Warmup(ModelFlags):
    """Compile what serving a checkpoint needs into the compilation cache, without reading a weight.

    Commands and programs that use the same cache (`JAX_COMPILATION_CACHE_DIR`, by default one of kimi-jax's own) then
    start without compiling. Compile on the kind of machine that will run.
    """

    directory: tyro.conf.Positional[Path]
    """A Hugging Face or converted checkpoint directory, or tiny-k3 or demo-k3 for a bundled one."""
    batch: tuple[int, ...] = (1,)
    """Rows of a call."""
    max_len: tuple[int, ...] = (1024,)
    """Tokens that a row of the cache can hold; rounded as `generate` does."""
    tokens: tuple[int, ...] = (*BUCKETS, PREFILL_PIECE)
    """New tokens a row of a call; 1 is decoding. Rounded as calls are; more than a row holds are left out."""
    job: Annotated[JobFlags, tyro.conf.arg(name="")] = field(default_factory=JobFlags)
    """Several processes that run this together."""

    def run(self) -> None:
        """Compiles each."""
        for name in ("batch", "max_len", "tokens"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise UsageError(f"--{name.replace('_', '-')} wants numbers of at least 1")
        if not compilation_cache():
            raise UsageError("there is no compilation cache: unset JAX_COMPILATION_CACHE_DIR, or name a directory")
        directory = find_checkpoint(self.directory)
        config = ModelConfig.from_file(directory)
        shape = mesh_shape(self.mesh)
        mesh = job_mesh(self.job.start(config, asdict(replace(self, job=JobFlags()))), shape)
        spec, params = declared_model(
            directory, mesh=mesh, dtype=self.dtype, dense_weights=self.dense_weights, adapters=self.adapters
        )
        for rows in self.batch:
            for room in self.max_len:
                capacity = cache_room(config, room)
                for count in sorted({bucket(tokens) for tokens in self.tokens if tokens <= capacity}):
                    step = Step("decode" if count == 1 else "prefill", rows, count, capacity)
                    _, *host, cache = step_arguments(spec, step)
                    tokens, lengths = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in host)  # NumPy arrays, in a call
                    start = time.perf_counter()
                    extend.lower(spec, params, tokens, lengths, cache).compile()
                    emit(f"{step.name}: {time.perf_counter() - start:.1f} s")
        emit(f"compiled into {compilation_cache()}")
