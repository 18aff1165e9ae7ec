"""`kimi-jax demo`: the bundled small model from its files to text, on 8 devices."""

import time
from dataclasses import dataclass, field
from typing import Annotated

import jax
import numpy as np
import tyro
from jax.sharding import NamedSharding

from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.checkpoint.load import load_model
from kimi_jax.cli.bundled import DEMO
from kimi_jax.cli.job import JobFlags, job_mesh
from kimi_jax.cli.output import UsageError, byte_progress, console, emit, print_table
from kimi_jax.config import ModelConfig
from kimi_jax.inference.caches import init_cache
from kimi_jax.inference.functions import decode, prefill
from kimi_jax.inference.generate import generate
from kimi_jax.inference.sampling import Sampling
from kimi_jax.model.model import Model, flatten
from kimi_jax.parallel.distributed import fetch
from kimi_jax.parallel.mesh import ask_for_cpu_devices

SHOWN = (
    "embed_tokens.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.A_log",
    "layers.3.self_attn.kv_b_proj.weight",
    "layers.3.block_sparse_moe.experts.w1.weight_packed",
    "layers.3.block_sparse_moe.experts.w1.weight_scale",
    "layers.3.block_sparse_moe.shared_experts.up_proj.weight",
    "lm_head.weight",
)
"""Parameters whose sharding is printed: one of each sort."""

ROWS, CAPACITY = 8, 256
"""Rows of the batch, and tokens that each can hold: one compilation serves timing and generation."""


@dataclass(frozen=True)
class Demo:
    """Load the bundled small model (K3's kinds of layers in the real layout, trained on the King James Bible) onto a
    data=2 × tensor=4 mesh, show how it lies there, and let it continue a text.
    """

    prompt: str = "And it came to pass"
    """What is continued."""
    max_new_tokens: int = 120
    """Tokens to generate."""
    temperature: float = 0.7
    """0 takes the most likely token."""
    seed: int = 0
    """Randomness; the same seed gives the same text."""
    job: Annotated[JobFlags, tyro.conf.arg(name="")] = field(default_factory=JobFlags)
    """Several processes that run this together."""

    def run(self) -> None:
        """Runs the demonstration."""
        config = ModelConfig.from_file(DEMO)
        tokenizer = Tokenizer.from_directory(DEMO, expected_vocab_size=config.vocab_size)
        prompt = tokenizer.encode(self.prompt)
        room = CAPACITY - len(prompt)
        if not prompt or not 1 <= self.max_new_tokens <= room:
            raise UsageError(f"the prompt has {len(prompt)} tokens (at least 1), --max-new-tokens must be 1 to {room}")
        try:
            sampling = Sampling(self.temperature, top_p=0.95, seed=self.seed)
        except ValueError as error:
            raise UsageError(str(error)) from None
        job = self.job.start(config, {"prompt": self.prompt, "seed": self.seed, "tokens": self.max_new_tokens})
        out = console()
        if job is None:
            ask_for_cpu_devices(8)
        mesh = job_mesh(job, {"data": 2, "tensor": 4} if len(jax.devices()) >= 8 else {"data": 1})
        assert mesh is not None
        started = time.perf_counter()
        with byte_progress("loading") as progress:
            model = load_model(DEMO, mesh=mesh, dtype="float32", progress=progress)
        seconds = time.perf_counter() - started
        device = jax.devices()[0]
        out.print(f"Loaded {DEMO}\nonto {mesh.size} × {device.device_kind}, mesh {dict(mesh.shape)}, ", end="")
        out.print(f"in {seconds:.2f} s: {model.config.num_layers} layers, experts packed in MXFP4.\n")
        columns = ("parameter", "shape", "dtype", "over", "a device holds")
        print_table(out, "What lies where", columns, _placement(model))
        out.print("Compiling prefill and decode … ", end="")
        started = time.perf_counter()
        _rates(model, prompt)
        out.print(f"{time.perf_counter() - started:.0f} s")
        prefill_rate, decode_rate = _rates(model, prompt)
        out.print(f"Prefill {prefill_rate:,.0f} tokens/s, decode {decode_rate:,.0f} tokens/s ({ROWS} rows).\n")
        decoder = tokenizer.incremental_decoder()

        def show(row: int, token: int) -> None:
            if row == 0:
                emit(decoder.push(token), end="")

        emit(self.prompt, end="")
        generate(model, [prompt] * ROWS, self.max_new_tokens, sampling, on_token=show)
        emit(decoder.flush())


def _placement(model: Model) -> list[tuple[str, ...]]:
    params = dict(flatten(model.params))
    rows: list[tuple[str, ...]] = []
    for name in SHOWN:
        array = params[name]
        over = array.sharding.spec if isinstance(array.sharding, NamedSharding) else ()
        axes = ", ".join("–" if axis is None else "×".join(axis) if isinstance(axis, tuple) else axis for axis in over)
        held = array.sharding.shard_shape(array.shape)
        rows.append((name, str(list(array.shape)), array.dtype.name, axes, str(list(held))))
    return rows


def _rates(model: Model, prompt: list[int], steps: int = 16) -> tuple[float, float]:
    """Tokens a second of one prefill and of `steps` decode steps, `ROWS` rows."""
    tokens = np.tile(np.asarray(prompt, np.int32), (ROWS, 1))
    cache = init_cache(model, ROWS, CAPACITY)
    started = time.perf_counter()
    logits, cache = prefill(model, tokens, [len(prompt)] * ROWS, cache)
    jax.block_until_ready(logits)
    prefilled = time.perf_counter()
    for _ in range(steps):
        logits, cache = decode(model, np.argmax(fetch(logits), axis=-1), cache)
    jax.block_until_ready(logits)
    ended = time.perf_counter()
    return tokens.size / (prefilled - started), ROWS * steps / (ended - prefilled)
