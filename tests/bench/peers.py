"""Ours beside transformers' `kimi_linear` on a CPU: one checkpoint of 200 million parameters, float32, two threads.

    python tests/bench/peers.py --peer OTHER/bin/python     # an interpreter with torch and transformers >= 5.24

Prints tokens/s of a prompt of 1,024 tokens and of decoding at batch 1 and 8 behind a prompt of 256, the largest
difference of the logits, and the machine's own limits: a matrix product's rate and a copy's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PROMPT, CONTEXT, STEPS = 1024, 256, 32
CONFIG = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "float32",
    "bos_token_id": 8189, "eos_token_id": 8190, "pad_token_id": 8191, "vocab_size": 8192, "hidden_size": 512,
    "intermediate_size": 2048, "num_hidden_layers": 8, "hidden_act": "silu", "rms_norm_eps": 1e-05,
    "initializer_range": 0.02, "model_max_length": 65536, "tie_word_embeddings": False, "use_cache": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 64, "num_heads": 8,
        "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 96, "kv_lora_rank": 128, "q_lora_rank": None,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "mla_use_nope": True, "rope_theta": 10000.0,
    "rope_scaling": None, "num_experts": 64, "num_experts_per_token": 8, "moe_intermediate_size": 256,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "num_expert_group": 1, "topk_group": 1,
    "use_grouped_topk": True, "num_nextn_predict_layers": 0,
}  # fmt: skip

PEER = """
import json, sys, time
import numpy as np, torch
from transformers import AutoModelForCausalLM
directory, out, prompt, context, steps = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(2)
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
ids = lambda rows, count: torch.from_numpy(np.random.default_rng(rows).integers(0, 8000, (rows, count)))
found = {}
with torch.inference_mode():
    best = 1e9
    for _ in range(3):
        start = time.perf_counter()
        logits = model(ids(1, prompt), logits_to_keep=1).logits
        best = min(best, time.perf_counter() - start)
    np.save(out, logits[0, -1].numpy())
    found["prefill"] = prompt / best
    for rows in (1, 8):
        past = model(ids(rows, context), use_cache=True, logits_to_keep=1)
        token, cache = past.logits[:, -1:].argmax(-1), past.past_key_values
        for step in range(steps + 2):
            if step == 2:
                start = time.perf_counter()
            past = model(token, past_key_values=cache, use_cache=True)
            token, cache = past.logits[:, -1:].argmax(-1), past.past_key_values
        found[f"decode {rows}"] = rows * steps / (time.perf_counter() - start)
print(json.dumps(found))
"""


def ids(rows: int, count: int) -> np.ndarray:
    """The same tokens as the other program's."""
    return np.random.default_rng(rows).integers(0, 8000, (rows, count))


def ours(directory: Path) -> tuple[dict[str, float], np.ndarray]:
    """Tokens/s by kind of call, and the logits behind the prompt."""
    import jax

    import kimi_jax as kj

    model = kj.load_model(directory, dtype="float32")
    found, best = {}, float("inf")
    for _ in range(4):
        cache = kj.init_cache(model, 1, PROMPT)
        jax.block_until_ready(cache)
        start = time.perf_counter()
        logits, cache = kj.prefill(model, ids(1, PROMPT), [PROMPT], cache)
        prompt_logits = np.asarray(logits[0])
        best = min(best, time.perf_counter() - start)
    found["prefill"] = PROMPT / best
    for rows in (1, 8):
        cache = kj.init_cache(model, rows, 2 * CONTEXT)
        logits, cache = kj.prefill(model, ids(rows, CONTEXT), [CONTEXT] * rows, cache)
        for step in range(STEPS + 2):
            if step == 2:
                start = time.perf_counter()
            logits, cache = kj.decode(model, np.asarray(logits).argmax(-1), cache)
        jax.block_until_ready(logits)
        found[f"decode {rows}"] = rows * STEPS / (time.perf_counter() - start)
    return found, prompt_logits


def limits() -> tuple[float, float]:
    """GFLOP/s of a float32 product of 2048 × 2048 and GB/s of a copy, read and write counted."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((2048, 2048))
    product = jax.jit(jnp.dot)
    block = np.ones(64 * 2**20, np.float32)
    target = np.empty_like(block)

    def best(run, times=5):
        run()
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    flops = 2 * 2048**3 / best(lambda: product(x, x).block_until_ready()) / 1e9
    return flops, 2 * block.nbytes / best(lambda: np.copyto(target, block)) / 1e9


def main() -> None:
    """Measures one after the other and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="an interpreter with torch and transformers; without it only ours runs")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    from safetensors.numpy import load_file, save_file

    from kimi_jax.checkpoint.synthesize import synthesize

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "mid"
        config = Path(scratch) / "config.json"
        config.write_text(json.dumps(CONFIG))
        synthesize(config, directory, seed=0)
        for file in directory.glob("*.safetensors"):  # stored as they are computed with, for both
            arrays = {name: x.astype(np.float32) for name, x in load_file(file).items()}
            save_file(arrays, file)
        flops, copy = limits()
        mine, logits = ours(directory)
        peer: dict[str, float] = {}
        if options.peer:
            logits_file = Path(scratch) / "logits.npy"
            numbers = map(str, (PROMPT, CONTEXT, STEPS))
            command = [options.peer, "-c", PEER, str(directory), str(logits_file), *numbers]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            peer = json.loads(done.stdout.splitlines()[-1])
            difference = np.abs(np.load(logits_file) - logits).max() / np.abs(logits).max()
            print(f"largest difference of the logits: {difference:.1e} of the largest", file=sys.stderr)
    print(f"machine: {flops:.0f} GFLOP/s of matrix products, {copy:.1f} GB/s of copies")
    print("| tokens/s | ours | transformers | ratio |\n| --- | --- | --- | --- |")
    for kind, rate in mine.items():
        other = f"{peer[kind]:.1f} | {rate / peer[kind]:.1f}" if kind in peer else "– | –"
        print(f"| {kind} | {rate:.1f} | {other} |")


if __name__ == "__main__":
    main()
