"""Training a small model whole: every parameter in float32, experts unpacked, the router's bias by the load."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.checkpoint.manifest import durable_file
from kimi_jax.checkpoint.write import write_checkpoint
from kimi_jax.config import ModelConfig, find_config, read_json_object
from kimi_jax.finetune.balance import expert_load, load_report, moved_bias
from kimi_jax.finetune.initial import initial_params
from kimi_jax.finetune.recipe import Recipe
from kimi_jax.finetune.windows import Text, evaluation_rows, read_text, training_rows
from kimi_jax.model.model import ModelSpec, Params, abstract_params, nest

METRICS, STATE, CHECKPOINT = "metrics.jsonl", "state.npz", "checkpoint"
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")
_BIAS = ".e_score_correction_bias"

Flat = dict[str, Array]
Report = Callable[[dict[str, Any]], None]
"""Called with the metrics of a step as they are written."""


@dataclass
class State:
    """What a step changes: trained parameters and router biases by dotted name, and the optimizer's own arrays."""

    params: Flat
    biases: Flat
    optimizer: Any


def training_spec(config: ModelConfig) -> ModelSpec:
    """The model as it is trained: float32, on one device, experts unpacked, no loop over layers."""
    return ModelSpec(replace(config, moe=replace(config.moe, packed=False)), None, jnp.dtype(jnp.float32))


def make_optimizer(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> optax.GradientTransformation:
    """Clipping, then adamw; or muon for the matrices inside layers and adamw for the rest."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, recipe.warmup, recipe.steps, recipe.learning_rate * recipe.final_rate
    )

    matrices = {name: _is_matrix(name, len(shape)) for name, shape in shapes.items()}
    if recipe.optimizer == "adamw":
        rule = optax.adamw(rate, b2=0.95, weight_decay=recipe.weight_decay, mask=matrices)
    else:
        sides = {
            name: optax.contrib.MuonDimensionNumbers(len(shape) - 1, len(shape) - 2) if matrices[name] else None
            for name, shape in shapes.items()
        }
        rule = optax.contrib.muon(
            rate,
            weight_decay=recipe.weight_decay,
            adam_b2=0.95,
            muon_weight_dimension_numbers=sides,
            consistent_rms=0.2,
        )
    return optax.chain(optax.clip_by_global_norm(recipe.clip), rule)


def _is_matrix(name: str, rank: int) -> bool:
    """Whether a parameter is one matrix inside a layer: not embedding, head, router, convolution or stacked experts."""
    named_otherwise = "_conv1d." in name or name.endswith(("gate.weight", "_res_proj.weight"))
    return name.startswith("layers.") and rank == 2 and not named_otherwise


def token_losses(spec: ModelSpec, params: Params, rows: Array) -> tuple[Array, dict[str, Array]]:
    """Cross entropy `[B, T]` in nats of each target of the rows `[B, T + 1]`, and the experts chosen by bias name."""
    module = spec.module(params)
    lengths = jnp.full((rows.shape[0],), rows.shape[1] - 1, jnp.int32)
    out = module(rows[:, :-1], lengths, seen=True)
    logits = module.logits(out.final_hidden)
    aim = jnp.take_along_axis(logits, rows[:, 1:, None], axis=-1)[..., 0]
    chosen = {
        f"layers.{layer}.block_sparse_moe.gate{_BIAS}": trace.router_index
        for layer, trace in enumerate(out.traces)
        if trace.router_index is not None
    }
    return jax.nn.logsumexp(logits, axis=-1) - aim, chosen


@partial(jax.jit, static_argnums=0)
def _gradients(spec: ModelSpec, params: Flat, biases: Flat, rows: Array) -> tuple[Flat, Flat, dict[str, Array]]:
    """Gradients, the load of every layer's experts, and the step's metrics."""

    def mean_loss(params: Flat) -> tuple[Array, dict[str, Array]]:
        losses, chosen = token_losses(spec, nest(params | biases), rows)
        return jnp.mean(losses), chosen

    (loss, chosen), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params)
    loads = {name: expert_load(index, spec.config.moe.num_experts) for name, index in chosen.items()}
    report = load_report(loads) if loads else {}
    return gradients, loads, {"loss": loss} | report


@partial(jax.jit, static_argnums=0)
def _held_out_nats(spec: ModelSpec, params: Params, rows: Array, counted: Array) -> Array:
    losses, _ = token_losses(spec, params, rows)
    return jnp.sum(jnp.where(counted, losses, 0))


def bits_per_byte(spec: ModelSpec, params: Params, text: Text, length: int, batch: int) -> float:
    """Bits that the model needs for a byte of the text, read in rows of `length` tokens that start with no memory."""
    nats = [_held_out_nats(spec, params, *rows) for rows in evaluation_rows(text.ids, length, batch)]
    return float(sum(map(float, nats))) / (np.log(2) * text.size)


class Trainer:
    """A run of a recipe in a folder; `run` goes on from what the folder holds."""

    def __init__(self, recipe: Recipe, out: str | Path) -> None:
        self.recipe, self.out = recipe, Path(out)
        self.raw_config = read_json_object(find_config(recipe.model))
        config = ModelConfig.from_dict(self.raw_config)
        self.spec = training_spec(config)
        self.tokenizer = Tokenizer.from_directory(recipe.tokenizer, expected_vocab_size=config.vocab_size)
        self.text = read_text(recipe.text, self.tokenizer)
        self.held_out = read_text(recipe.held_out, self.tokenizer)
        params = abstract_params(self.spec.config)
        shapes = {name: struct.shape for name, (struct, _) in params.items() if not name.endswith(_BIAS)}
        self.optimizer = make_optimizer(recipe, shapes)
        self._apply = jax.jit(self._updated, donate_argnums=(0, 1))

    def start(self) -> State:
        """The state before the first step."""
        values = {name: jnp.asarray(value) for name, value in initial_params(self.spec.config, self.recipe.seed).items()}
        params = {name: value for name, value in values.items() if not name.endswith(_BIAS)}
        biases = {name: value for name, value in values.items() if name.endswith(_BIAS)}
        return State(params, biases, self.optimizer.init(params))

    def _updated(self, params: Flat, optimizer: Any, gradients: Flat) -> tuple[Flat, Any, Array]:
        updates, optimizer = self.optimizer.update(gradients, optimizer, params)
        return optax.apply_updates(params, updates), optimizer, optax.global_norm(gradients)

    def step(self, state: State, number: int) -> tuple[State, dict[str, Array]]:
        """Step `number`, from 0; the arrays of `state` are given up."""
        recipe = self.recipe
        rows = training_rows(self.text.ids, recipe.sequence, recipe.batch, recipe.seed, number)
        gradients, loads, report = _gradients(self.spec, state.params, state.biases, rows)
        params, optimizer, norm = self._apply(state.params, state.optimizer, gradients)
        biases = {name: moved_bias(bias, loads[name], recipe.bias_rate) for name, bias in state.biases.items()}
        return State(params, biases, optimizer), report | {"gradient_norm": norm}

    def run(self, report: Report | None = None) -> State:
        """Trains to the last step and writes the checkpoint; begun runs go on after their last saved step."""
        recipe = self.recipe
        self.out.mkdir(parents=True, exist_ok=True)
        state, done = self._resume()
        since, before = time.perf_counter(), done
        for number in range(done, recipe.steps):
            state, metrics = self.step(state, number)
            done = number + 1
            last = done == recipe.steps
            if done % recipe.log_every == 0 or done % recipe.evaluate_every == 0 or last or done == 1:
                line: dict[str, Any] = {"step": done} | {name: _number(value) for name, value in metrics.items()}
                tokens = (done - before) * recipe.batch * recipe.sequence
                line["tokens_per_second"] = round(tokens / (time.perf_counter() - since), 1)
                if done % recipe.evaluate_every == 0 or last:
                    line["held_out_bits_per_byte"] = round(self.evaluate(state), 5)
                with (self.out / METRICS).open("a") as file:
                    file.write(json.dumps(line) + "\n")
                if report is not None:
                    report(line)
                since, before = time.perf_counter(), done
            if done % recipe.save_every == 0 or last:
                self._save(state, done)
        self.write(state)
        return state

    def evaluate(self, state: State) -> float:
        """Bits per byte of the held-out text."""
        params = nest(state.params | state.biases)
        return bits_per_byte(self.spec, params, self.held_out, self.recipe.sequence, self.recipe.batch)

    def write(self, state: State) -> Path:
        """Writes the parameters as a Hugging Face checkpoint with float32 experts, and the tokenizer beside them."""
        config = {key: value for key, value in self.raw_config.items() if key != "quantization_config"}
        if "text_config" in config:
            text = config["text_config"]
            config["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
        params = {name: np.asarray(value) for name, value in (state.params | state.biases).items()}
        folder = Path(self.recipe.tokenizer)
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).exists()}
        write_checkpoint(self.out / CHECKPOINT, config, params, files)
        return self.out / CHECKPOINT

    def _save(self, state: State, done: int) -> None:
        leaves = jax.tree.leaves((state.params, state.biases, state.optimizer))
        with durable_file(self.out / STATE) as file:
            np.savez(file, step=done, **{f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)})

    def _resume(self) -> tuple[State, int]:
        """The saved state and its step, or the start; metrics of later steps are dropped, they will come again."""
        state, metrics = self.start(), self.out / METRICS
        if not (self.out / STATE).exists():
            metrics.unlink(missing_ok=True)
            return state, 0
        tree = jax.tree.structure((state.params, state.biases, state.optimizer))
        with np.load(self.out / STATE) as saved:
            leaves = [jnp.asarray(saved[f"leaf{i}"]) for i in range(tree.num_leaves)]
            done = int(saved["step"])
        kept = [line for line in metrics.read_text().splitlines() if json.loads(line)["step"] <= done]
        metrics.write_text("".join(f"{line}\n" for line in kept))
        return State(*jax.tree.unflatten(tree, leaves)), done


def _number(value: Array) -> int | float:
    return int(value) if jnp.issubdtype(value.dtype, jnp.integer) else round(float(value), 5)
