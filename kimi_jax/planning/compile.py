"""Ahead-of-time compilation: prefill and decode of a model for a pod that is not there, and what they cost a device."""

import math
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from kimi_jax.config import ModelConfig
from kimi_jax.finetune.optimizer import make_optimizer
from kimi_jax.finetune.settings import FinetuneConfig
from kimi_jax.finetune.step import Tokens, state_layout, train_step
from kimi_jax.finetune.targets import adapter_spec
from kimi_jax.inference.arguments import bucket
from kimi_jax.inference.caches import cache_placement
from kimi_jax.inference.functions import extend
from kimi_jax.model.model import ModelSpec, Params, nest, placed_layout
from kimi_jax.ops import (
    grouped_gpu_kernel,
    grouped_kernel,
    grouped_loop,
    grouped_matmul,
    indexer,
    latent_attention,
    latent_kernel,
    selection,
)
from kimi_jax.ops.tpu import LANES
from kimi_jax.parallel.mesh import MeshError
from kimi_jax.parallel.sharding import array_sharding
from kimi_jax.planning.hlo import Shape
from kimi_jax.planning.memory import place
from kimi_jax.planning.pods import Pod
from kimi_jax.planning.program import Kernel, Program
from kimi_jax.planning.topology import compiler_options, pod_mesh

Phase = Literal["prefill", "decode", "train"]


@dataclass(frozen=True)
class Step:
    """One call of a compiled function: `tokens` a row are added to `batch` rows of a cache of `context` places.

    Of the phase "train" there is no cache: a step of fine-tuning on `batch` rows of `tokens` tokens; see `training`.
    """

    phase: Phase
    batch: int
    tokens: int
    context: int
    training: FinetuneConfig | None = None

    @property
    def name(self) -> str:
        """For file names, e.g. "decode-64x1-8192"."""
        return f"{self.phase}-{self.batch}x{self.tokens}-{self.context}"

    @property
    def filled(self) -> int:
        """Places that the loops over the cache are taken to read: all when decoding, the first piece's in prefill."""
        return self.context if self.phase == "decode" else min(self.tokens, self.context)


def training_step(settings: FinetuneConfig) -> Step:
    """The step that a run of fine-tuning repeats."""
    data = settings.data
    return Step("train", data.rows, data.length, data.length, settings)


@dataclass(frozen=True)
class LoopCount:
    """Loops that come from one function: how many, and the rounds of each.

    `source`: rounds are "known" to the compiler, "assumed" (`assumed_rounds`), or "unknown" and counted once.
    """

    function: str
    loops: int
    rounds: float
    source: str


@dataclass(frozen=True)
class Compiled:
    """A compiled step; bytes and operations of one device.

    - `arguments`, `temporaries`, `outputs`, `aliased`, `code`: as the compiler allots them; outputs that are aliased
        lie in the arguments' memory (the donated cache).
    - `lower_seconds`, `compile_seconds`: by the clock; `compile_cpu_seconds` of all threads: on a machine with other
        work, what the compiler itself took.
    - `collectives`: operations and bytes by kind, of each operation the larger of what goes in and what comes out.
    - `flops_once`, `bytes_once`: XLA's own count, loop bodies once, traffic with the chip's fast memory included; None
        where the backend has none.
    - `flops`, `bytes`: of the matrix products, and read from and written to HBM, from the program's text, every round
        of its loops counted.
    - `saved`: the file with the serialised executable, or why there is none.
    """

    step: Step
    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    code: int
    lower_seconds: float
    compile_seconds: float
    compile_cpu_seconds: float
    flops_once: float | None
    bytes_once: float | None
    flops: float
    bytes: float
    loops: tuple[LoopCount, ...]
    collectives: dict[str, tuple[float, float]]
    saved: str | None = None

    @property
    def total(self) -> int:
        """HBM that the call needs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True)
class Refused:
    """A step that does not fit, by its arguments alone or by what the compiler said.

    - `total`: bytes a device, where they are known. `reason`: a sentence.
    """

    step: Step
    total: int | None
    reason: str


def first_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The model cut behind its first `layers` layers. **Raises:** `ValueError` where it has fewer."""
    if not 1 <= layers <= config.num_layers:
        raise ValueError(f"layers must lie between 1 and the model's {config.num_layers}, found {layers}")
    sparse = config.indexer
    if sparse is not None:
        sparse = replace(sparse, layers=tuple(layer for layer in sparse.layers if layer < layers))
    return replace(config, layer_kinds=config.layer_kinds[:layers], indexer=sparse)


def pod_step(pod: Pod, phase: Phase, batch: int | None, context: int | None, tokens: int) -> Step:
    """The pod's decode step, or a piece of a prompt of `tokens` tokens for one row a `data` shard."""
    context = context or pod.context
    if phase == "decode":
        return Step(phase, batch or pod.batch, 1, context)
    return Step(phase, pod.mesh.get("data", 1), bucket(tokens), context)


def argument_bytes(config: ModelConfig, pod: Pod, step: Step, dense_weights: str = "bf16") -> int:
    """Weights and cache of one device, from the table of shardings alone."""
    placement = place(config, pod.mesh, step.context, dense_weights)
    if step.phase == "train":
        return placement.weight_bytes
    if step.batch % placement.groups:
        raise MeshError(f"a batch of {step.batch} cannot be split over {placement.groups} groups of devices")
    return placement.weight_bytes + step.batch // placement.groups * placement.conversation


def compile_steps(
    config: ModelConfig,
    pod: Pod,
    steps: Sequence[Step],
    save: Path | None = None,
    name: str = "model",
    dense_weights: str = "bf16",
) -> Iterator[Compiled | Refused]:
    """Compiles each step for the pod; what cannot fit is refused before.

    **Arguments:**

    - `save`: a directory for the serialised executables; their names begin with `name`.
    - `dense_weights`: as `load_model` takes it.

    **Raises:** `MeshError` where the mesh does not divide the model, `CompilerError` where no compiler is installed.
    """
    mesh: Mesh | None = None
    for step in steps:
        size = argument_bytes(config, pod, step, dense_weights)
        if size > pod.hbm_bytes:
            yield Refused(step, size, "weights and cache alone are larger than the memory; nothing was compiled")
            continue
        mesh = mesh or pod_mesh(pod)
        spec = ModelSpec(config, mesh, jnp.dtype(jnp.bfloat16), loop=True, dense_weights=dense_weights)
        yield _compile(spec, pod, step, None if save is None else save / f"{name}-{pod.name}-{step.name}.pickle")


def step_arguments(spec: ModelSpec, step: Step) -> tuple[Any, ...]:
    """What `inference.functions.extend` takes besides `spec`: shapes, dtypes and shardings, nothing allocated."""
    layout, shardings = cache_placement(spec, step.batch, step.context)
    cache = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), layout, shardings)
    whole = None if spec.mesh is None else NamedSharding(spec.mesh, PartitionSpec())  # callers pass NumPy arrays
    tokens = jax.ShapeDtypeStruct((step.batch, step.tokens), jnp.int32, sharding=whole)
    lengths = jax.ShapeDtypeStruct((step.batch,), jnp.int32, sharding=whole)
    return _base_params(spec), tokens, lengths, cache


def _base_params(spec: ModelSpec) -> Params:
    return nest({name: like for name, (like, _) in placed_layout(spec).items()})


def lower_training(spec: ModelSpec, step: Step) -> jax.stages.Lowered:
    """A step of fine-tuning, traced for arguments of which only shapes, dtypes and shardings are known.

    The one that also runs the base model for the router's drift, where the settings want it in some steps.
    """
    assert step.training is not None
    settings = step.training
    adapted = replace(spec, adapters=adapter_spec(spec.config, settings.lora))
    optimizer = make_optimizer(settings.optimizer, settings.run.steps)

    def by_row(name: str, dtype: DTypeLike) -> Any:
        shape = (step.batch,) if name == "lengths" else (step.batch, step.tokens)
        axes = ("batch", *(None,) * (len(shape) - 1))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=array_sharding(name, shape, axes, spec.mesh))

    batch = Tokens(*(by_row(name, jnp.float32 if name == "weights" else jnp.int32) for name in Tokens._fields))
    key = jax.eval_shape(jax.random.key, 0)
    state = state_layout(adapted, optimizer)
    static = adapted, optimizer, settings.lora.dropout, settings.run.drift_every > 0
    return train_step.lower(*static, _base_params(spec), state, batch, key)


@dataclass(frozen=True)
class Load:
    """What the experts of one device are taken to get in a step, of tokens that choose evenly.

    - `rows`: copies of tokens. `met`: experts with at least one, each met with probability
        `1 - (1 - A/E)^(tokens)`.
    """

    rows: float
    met: float


def expert_load(spec: ModelSpec, step: Step) -> Load:
    """The load of a device's experts."""
    moe, devices = spec.config.moe, 1 if spec.mesh is None else spec.mesh.size
    tokens = step.batch * step.tokens
    met = 1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens
    return Load(tokens * moe.experts_per_token / devices, moe.num_experts // devices * met)


def assumed_rounds(spec: ModelSpec, step: Step) -> dict[str, float]:
    """Rounds of the loops whose number the data decide, by function: caches filled as far as `Step.filled`."""
    load, moe = expert_load(spec, step), spec.config.moe
    held = moe.num_experts // (1 if spec.mesh is None else spec.mesh.size)
    copies = step.batch * step.tokens * moe.experts_per_token
    tile = grouped_loop.tile_rows(copies, held)
    mean = copies / moe.num_experts
    tiles = held * max(load.met / held, mean / tile + 0.5 if mean > tile else 0)
    return {
        grouped_loop.loop_product.__name__: tiles,
        # What a derivative is taken of comes, for the compiler, from where it is called.
        grouped_matmul.grouped_matmul.__name__: tiles,
        latent_attention._attend.__name__: float(math.ceil(step.filled / latent_attention.KEY_BLOCK)),
        indexer.choose_positions.__name__: float(math.ceil(step.filled / indexer.KEY_BLOCK)),
        selection._over_parts.__name__: float(math.ceil(step.filled / (selection.COUNTED * LANES))),
    }


def kernels(spec: ModelSpec, step: Step) -> dict[str, Kernel]:
    """Work of the hand-written kernels in a step, by function."""
    load = expert_load(spec, step)

    def on_tpu(arrays: Sequence[Shape]) -> tuple[float, float]:
        experts, outputs, width = _largest_bytes(arrays)[-3:]
        rows = next(x for x in arrays if len(x.sizes) == 2)
        return grouped_kernel.kernel_work(rows.sizes[0], experts, outputs, width, rows.bits // 8, load.rows, load.met)

    def on_gpu(arrays: Sequence[Shape]) -> tuple[float, float]:
        experts, outputs, groups, part = _largest_bytes(arrays)[-4:]
        rows = next(x for x in arrays if len(x.sizes) == 2)
        return grouped_gpu_kernel.gpu_kernel_work(
            rows.sizes[0], experts, outputs, groups * part, rows.bits // 8, load.rows, load.met
        )

    def attention(arrays: Sequence[Shape]) -> tuple[float, float]:
        wide = [x for x in arrays if x.bits >= 16 and len(x.sizes) > 2]
        parts = 1 if spec.mesh is None else spec.mesh.shape["context"]
        filled, sizes = -(-step.filled // parts), [tuple(x.sizes) for x in wide]
        return latent_kernel.kernel_work(sizes, filled, spec.config.mla.kv_rank, wide[1].bits // 8)

    on_this = on_tpu if spec.mesh is None or spec.mesh.devices.flat[0].platform == "tpu" else on_gpu
    return {
        grouped_matmul.grouped_matmul.__name__: on_this,  # in a training step; see `assumed_rounds`
        grouped_kernel.kernel_product.__name__: on_tpu,
        grouped_gpu_kernel.gpu_kernel_product.__name__: on_gpu,
        latent_kernel.kernel_attention.__name__: attention,
    }


def _largest_bytes(arrays: Sequence[Shape]) -> tuple[int, ...]:
    """Sizes of the largest array of bytes."""
    return max((x for x in arrays if x.bits == 8), key=lambda x: x.bytes).sizes


def _compile(spec: ModelSpec, pod: Pod, step: Step, save: Path | None) -> Compiled | Refused:
    start = time.perf_counter()
    lowered = lower_training(spec, step) if step.phase == "train" else extend.lower(spec, *step_arguments(spec, step))
    middle, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as dump:
        try:
            compiled = lowered.compile(compiler_options=compiler_options(pod, Path(dump)))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return Refused(step, None, f"the compiler found no room: {str(error).splitlines()[0]}")
        end, cpu = time.perf_counter(), time.process_time() - cpu
        texts = sorted(Path(dump).glob("*.after_optimizations.txt"), key=lambda path: path.stat().st_size)
        text = texts[-1].read_text() if texts else compiled.as_text() or ""
    program = Program(text, assumed_rounds(spec, step), kernels(spec, step))
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis() or {}
    counts = Counter((loop.function, loop.rounds, loop.source) for loop in program.loops)
    return Compiled(
        step,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.generated_code_size_in_bytes,
        middle - start,
        end - middle,
        cpu,
        cost.get("flops"),
        cost.get("bytes accessed"),
        float(program.product_flops()),
        float(program.traffic()),
        tuple(LoopCount(function, loops, rounds, why) for (function, rounds, why), loops in sorted(counts.items())),
        program.collectives(),
        None if save is None else save_executable(compiled, save),
    )


def save_executable(compiled: jax.stages.Compiled, path: Path) -> str:
    """Pickles what `jax.experimental.serialize_executable.deserialize_and_load` takes; returns the path, or why not.

    Only the same jax, compiler and kind of machine can load it.
    """
    try:
        raw = pickle.dumps(serialize_executable.serialize(compiled))
    except Exception as error:  # each backend refuses in its own way
        return f"not saved: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return str(path)


def roofline(pod: Pod, compiled: Compiled) -> tuple[float, str]:
    """Least seconds of a step, and what sets them: HBM bytes over the bandwidth, or FLOPs over the peak."""
    peak = pod.device.peak_flops
    moving = compiled.bytes / pod.bandwidth
    computing = 0.0 if peak is None else compiled.flops / (peak / pod.device.jax_devices)
    return max(moving, computing), "memory" if moving >= computing else "compute"
