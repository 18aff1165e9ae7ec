"""Training a small model whole: every parameter in float32, experts unpacked, the router's bias by the load.

RUN/run.json         what it was started with
RUN/metrics.jsonl    a line every few steps
RUN/state.npz        parameters, biases and optimizer of the last save
RUN/checkpoint/      the model as a Hugging Face checkpoint, at the end
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jaxtyping import Array

from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.checkpoint.manifest import durable_file
from kimi_jax.checkpoint.names import is_stacked
from kimi_jax.checkpoint.write import write_checkpoint
from kimi_jax.config import ModelConfig, find_config, read_json_object
from kimi_jax.finetune.balance import moved_bias
from kimi_jax.finetune.initial import initial_params
from kimi_jax.finetune.loss import next_token_loss
from kimi_jax.finetune.optimizer import OptimizerConfig, make_optimizer
from kimi_jax.finetune.router_statistics import choices_of, expert_counts, router_load
from kimi_jax.finetune.run_directory import RunError, cut_metrics, open_run
from kimi_jax.finetune.settings import check_seed
from kimi_jax.finetune.windows import Text, evaluation_rows, read_text, training_rows
from kimi_jax.model.model import ModelSpec, Params, abstract_params, computing, nest

TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")
_BIAS = ".e_score_correction_bias"

Flat = dict[str, Array]


@dataclass(frozen=True)
class ModelFiles:
    """What the model is."""

    config: str
    """A config.json in the published format, or a shipped name."""
    tokenizer: str
    """A directory with tiktoken.model."""


@dataclass(frozen=True)
class TextConfig:
    """What it reads; empty lines end documents, `[EOS]` follows each."""

    train: tuple[str, ...]
    """Files of UTF-8 text."""
    held_out: tuple[str, ...]
    """Files that are only evaluated."""
    rows: int = 8
    """Rows of a batch."""
    length: int = 256
    """Tokens of a row that are predicted."""

    def __post_init__(self) -> None:
        for name in ("rows", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"text: {name} {getattr(self, name)} must be at least 1")
        for name in ("train", "held_out"):
            if not getattr(self, name):
                raise ValueError(f"text: {name} names no file")


@dataclass(frozen=True)
class PretrainRun:
    """How long a run is, and what it does on the way; all in steps."""

    steps: int
    """Batches in all."""
    seed: int = 0
    """Decides the first values and the order of the text."""
    bias_rate: float = 1e-3
    """Step of the router's bias; see `kimi_jax.finetune.balance`."""
    log_every: int = 10
    """Steps between lines of metrics."""
    evaluate_every: int = 100
    """Steps between evaluations of the held-out text; the last step has one too."""
    save_every: int = 100
    """Steps between saves; the last step is saved too."""
    remat: bool = False
    """Whether the backward pass computes each layer again instead of keeping what happens inside."""
    dense_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the written checkpoint but its experts; bfloat16: where the published layout has it."""
    expert_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the experts written; quantize packs either."""

    def __post_init__(self) -> None:
        for name in ("steps", "log_every", "evaluate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"run: {name} {getattr(self, name)} must be at least 1")
        check_seed(self.seed)
        if not 0 <= self.bias_rate < math.inf:
            raise ValueError(f"run: bias_rate {self.bias_rate} must be at least 0 and finite")


@dataclass(frozen=True)
class PretrainConfig:
    """Everything about the training of a whole model; read by `kimi_jax.finetune.settings.read_settings`."""

    model: ModelFiles
    text: TextConfig
    run: PretrainRun
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class State:
    """What a step changes: trained parameters and router biases by dotted name, and the optimizer's own arrays."""

    params: Flat
    biases: Flat
    optimizer: Any


def training_spec(config: ModelConfig) -> ModelSpec:
    """The model as it is trained: float32, on one device, experts unpacked, no loop over layers."""
    return ModelSpec(replace(config, moe=replace(config.moe, packed=False)), None, jnp.dtype(jnp.float32))


def is_matrix(name: str, rank: int) -> bool:
    """Whether a parameter is one matrix inside a layer: not embedding, head, router, convolution or stacked experts."""
    named_otherwise = "_conv1d." in name or name.endswith(("gate.weight", "_res_proj.weight"))
    return name.startswith("layers.") and rank == 2 and not named_otherwise


def rows_loss(
    spec: ModelSpec, params: Params, rows: Array, weights: Array, remat: bool = False
) -> tuple[Array, dict[str, Array]]:
    """Weighted sum, in nats, of the loss of the rows' targets, and the experts chosen in each layer, by bias name.

    `rows` `[B, T + 1]` hold inputs and, one later, targets; `weights` `[B, T]`.
    """
    with computing(spec):
        module = spec.module(params)
        lengths = jnp.full((rows.shape[0],), rows.shape[1] - 1, jnp.int32)
        out = module(rows[:, :-1], lengths, observe=choices_of, remat=remat)
        total = next_token_loss(module, out.final_hidden, rows[:, 1:], weights)
    found = enumerate(out.observed)
    return total, {f"layers.{i}.block_sparse_moe.gate{_BIAS}": index for i, index in found if index is not None}


@partial(jax.jit, static_argnums=(0, 1))
def _gradients(
    spec: ModelSpec, remat: bool, params: Flat, biases: Flat, rows: Array
) -> tuple[Flat, Flat, dict[str, Array]]:
    """Gradients, the load of every layer's experts, and the step's metrics."""
    ones = jnp.ones((rows.shape[0], rows.shape[1] - 1), jnp.float32)

    def mean_loss(params: Flat) -> tuple[Array, dict[str, Array]]:
        total, chosen = rows_loss(spec, nest(params | biases), rows, ones, remat)
        return total / ones.size, chosen

    (loss, chosen), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params)
    real, experts = ones > 0, spec.config.moe.num_experts
    loads = {name: expert_counts(index, real, experts) for name, index in chosen.items()}
    load = router_load(list(chosen.values()), real, experts) if chosen else {}
    return gradients, loads, {"loss": loss} | load


@partial(jax.jit, static_argnums=0)
def _nats(spec: ModelSpec, params: Params, rows: Array, weights: Array) -> Array:
    return rows_loss(spec, params, rows, weights)[0]


def bits_per_byte(spec: ModelSpec, params: Params, text: Text, length: int, rows: int) -> float:
    """Bits that a model needs for a byte of the text, read in rows of `length` tokens that start with no memory."""
    nats = sum(float(_nats(spec, params, *batch)) for batch in evaluation_rows(text.ids, length, rows))
    return nats / (float(np.log(2)) * text.size)


class Pretraining:
    """A run in a folder. `text` and `held_out` are what it reads, `spec` is the model as it is trained."""

    def __init__(self, config: PretrainConfig, out: str | Path) -> None:
        config.optimizer.check_steps(config.run.steps)
        self.config, self.out = config, Path(out)
        self.raw_config = read_json_object(find_config(config.model.config))
        model = ModelConfig.from_dict(self.raw_config)
        self.spec = training_spec(model)
        self.tokenizer = Tokenizer.from_directory(config.model.tokenizer, expected_vocab_size=model.vocab_size)
        self.text = read_text(config.text.train, self.tokenizer)
        self.held_out = read_text(config.text.held_out, self.tokenizer)
        shapes = {name: struct.shape for name, (struct, _) in abstract_params(self.spec.config).items()}
        matrices = {n: is_matrix(n, len(shape)) for n, shape in shapes.items() if not n.endswith(_BIAS)}
        training_rows(self.text.ids, config.text.length, 1, 0, 0)  # a text too short for a row is told here
        self.optimizer = make_optimizer(config.optimizer, config.run.steps, matrices)
        self._update = jax.jit(self._updated, donate_argnums=(0, 1))

    def start(self) -> State:
        """The state before the first step."""
        values = initial_params(self.spec.config, self.config.run.seed)
        arrays = {name: jnp.asarray(value) for name, value in values.items()}
        params = {name: value for name, value in arrays.items() if not name.endswith(_BIAS)}
        biases = {name: value for name, value in arrays.items() if name.endswith(_BIAS)}
        return State(params, biases, self.optimizer.init(params))

    def _updated(self, params: Flat, optimizer: Any, gradients: Flat) -> tuple[Flat, Any, Array]:
        updates, optimizer = self.optimizer.update(gradients, optimizer, params)
        return optax.apply_updates(params, updates), optimizer, optax.tree.norm(gradients)

    def step(self, state: State, number: int) -> tuple[State, dict[str, Array]]:
        """Step `number`, from 0; the arrays of `state` are given up."""
        text, run = self.config.text, self.config.run
        rows = training_rows(self.text.ids, text.length, text.rows, run.seed, number)
        gradients, loads, found = _gradients(self.spec, run.remat, state.params, state.biases, rows)
        params, optimizer, norm = self._update(state.params, state.optimizer, gradients)
        biases = {name: moved_bias(bias, loads[name], run.bias_rate) for name, bias in state.biases.items()}
        return State(params, biases, optimizer), found | {"gradient_norm": norm}

    def run(self, report: Callable[[dict[str, Any]], None] = lambda _: None) -> State:
        """Trains to the last step and writes the checkpoint; a run that was stopped goes on from its last save.

        `report` is called with each line of the metrics.
        """
        run = self.config.run
        origin = {"text": self.text.size, "tokens": len(self.text.ids), "vocabulary": self.tokenizer.vocab_size}
        saved = (self.out / "state.npz").exists()
        open_run(self.out, {"origin": origin, "model": self.raw_config, "settings": asdict(self.config)}, saved)
        state, done = self._resume()
        since, before = time.perf_counter(), done
        for step in range(done + 1, run.steps + 1):
            state, found = self.step(state, step - 1)
            last = step == run.steps
            evaluate = last or step % run.evaluate_every == 0
            if evaluate or step == 1 or step % run.log_every == 0:
                line: dict[str, Any] = {"step": step} | {n: round(float(value), 6) for n, value in found.items()}
                tokens = (step - before) * self.config.text.rows * self.config.text.length
                line["tokens_per_second"] = round(tokens / (time.perf_counter() - since), 1)
                if evaluate:
                    line["held_out_bits_per_byte"] = round(self.evaluate(state), 6)
                with self._metrics.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                since, before = time.perf_counter(), step
                report(line)
            if last or step % run.save_every == 0:
                self._save(state, step)
        self.write(state)
        return state

    def evaluate(self, state: State) -> float:
        """Bits per byte of the held-out text."""
        params, text = nest(state.params | state.biases), self.config.text
        return bits_per_byte(self.spec, params, self.held_out, text.length, text.rows)

    def write(self, state: State) -> Path:
        """Writes the model as a Hugging Face checkpoint, its experts unpacked, and the tokenizer beside it."""
        bfloat16, run = np.dtype(ml_dtypes.bfloat16), self.config.run
        rounded = {
            name
            for name, (struct, _) in abstract_params(self.spec.config).items()
            if struct.dtype == bfloat16 and (run.expert_dtype if is_stacked(name) else run.dense_dtype) == "bfloat16"
        }
        values = {name: np.asarray(value) for name, value in (state.params | state.biases).items()}
        params = {name: value.astype(bfloat16) if name in rounded else value for name, value in values.items()}
        folder = Path(self.config.model.tokenizer)
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).exists()}
        write_checkpoint(self.out / "checkpoint", _unpacked(self.raw_config), params, files)
        return self.out / "checkpoint"

    @property
    def _metrics(self) -> Path:
        return self.out / "metrics.jsonl"

    def _save(self, state: State, step: int) -> None:
        leaves = jax.tree.leaves((state.params, state.biases, state.optimizer))
        with durable_file(self.out / "state.npz") as file:
            np.savez(file, np.asarray(step), *map(np.asarray, leaves))

    def _resume(self) -> tuple[State, int]:
        """The saved state and its step, or the start. Metrics of later steps are dropped: they will come again."""
        state = self.start()
        if not (self.out / "state.npz").exists():
            cut_metrics(self._metrics, 0)
            return state, 0
        like, tree = jax.tree.flatten((state.params, state.biases, state.optimizer))
        try:
            with (self.out / "state.npz").open("rb") as file, np.load(file) as saved:
                step, *leaves = (saved[name] for name in saved.files)
            if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in like]:
                raise ValueError(f"it holds {len(leaves)} arrays, not the {len(like)} of this model and optimizer")
        except (ValueError, TypeError, EOFError, BadZipFile) as error:
            found = f"{self.out / 'state.npz'}: cannot be used: {error}"
            raise RunError(f"{found}; delete it to start again from step 0, or choose another directory") from None
        cut_metrics(self._metrics, int(step))
        return State(*jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in leaves])), int(step)


def _unpacked(config: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` that says nothing of packed experts."""
    own = {key: value for key, value in config.items() if key != "quantization_config"}
    return own | ({"text_config": _unpacked(own["text_config"])} if "text_config" in own else {})
