"""Dense weights in eight bits against those of the checkpoint, in float32: relative RMS errors of the tiny models.

    python tests/bench/dense_weights.py

A sublayer is the first of its kind and gets the same 40 random inputs; logits are those of the golden sequence, with
the router's own choices, and with those of the unrounded model.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import NAMES, checkpoint_directory, load_golden

import kimi_jax as kj
from kimi_jax.model.call import make_call
from kimi_jax.model.model import computing


def relative_rms(found: Any, wanted: Any) -> float:
    """Of `found - wanted` over that of `wanted`."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))


def sublayers(model: kj.Model) -> dict[str, Any]:
    """Outputs of the first sublayer of each kind, and of the head."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 40, model.config.hidden_size)), jnp.float32)

    @jax.jit
    def run(params: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with computing(model.spec):
            module, call = model.spec.module(params), make_call(40, jnp.asarray([40]), None)
            for number, layer in enumerate(module.layers):
                kind = model.config.layer_kinds[number] + (", indexed" if model.config.has_indexer(number) else "")
                if kind not in found:
                    found[kind] = layer.self_attn(x, call, None)[0]
                if not layer.has_experts:
                    found.setdefault("dense MLP", layer.mlp(x))
                elif "shared experts" not in found:
                    found["shared experts"] = layer.block_sparse_moe.shared_experts(x)
            return found | {"head": module.logits(x)}

    return run(model.params)


def logits(model: kj.Model, tokens: np.ndarray, choice: dict[int, Any] | None = None) -> tuple[Any, dict[int, Any]]:
    """Logits, and each layer's choice of experts."""

    @jax.jit
    def run(params: Any, choice: Any) -> tuple[Any, Any]:
        with computing(model.spec):
            module = model.spec.module(params)
            out = module(
                jnp.asarray(tokens), jnp.asarray([tokens.shape[1]]), choice=choice, observe=lambda trace: trace
            )
            return module.logits(out.final_hidden), [trace.router_index for trace in out.observed]

    found, chosen = run(model.params, choice)
    return found, {number: index for number, index in enumerate(chosen) if index is not None}


def main() -> None:
    """Prints a line for each model and dtype."""
    for name in NAMES:
        tokens = load_golden(name)["seq_input_ids"][None]
        directory = checkpoint_directory(name)
        before = kj.load_model(directory, dtype="float32", loop=False)
        parts, (wanted, choice) = sublayers(before), logits(before, tokens)
        for kind in ("int8", "fp8"):
            model = kj.load_model(directory, dtype="float32", loop=False, dense_weights=kind)
            errors = {part: relative_rms(out, parts[part]) for part, out in sublayers(model).items()}
            errors["logits, same experts"] = relative_rms(logits(model, tokens, choice)[0], wanted)
            errors["logits"] = relative_rms(logits(model, tokens)[0], wanted)
            print(f"{name}, {kind}: ", ", ".join(f"{part} {error:.4f}" for part, error in errors.items()), flush=True)


if __name__ == "__main__":
    main()
