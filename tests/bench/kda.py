"""The chunk form of KDA beside the step form: one sequence, 8 heads of 64, float32.

python tests/bench/kda.py [TOKENS …]        # 4096 and 32768
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.ops.kda import kda_chunked, kda_recurrent

HEADS, WIDTH, REPEATS = 8, 64, 5


def arguments(tokens: int) -> tuple[jax.Array, ...]:
    """Random queries, keys, values, decays, strengths, and an empty state."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(1, tokens, *shape)).astype(np.float32)

    q, k, v, g = (normal(HEADS, WIDTH) for _ in range(4))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    beta = 1 / (1 + np.exp(-normal(HEADS)))
    state = np.zeros((1, HEADS, WIDTH, WIDTH), np.float32)
    return tuple(map(jnp.asarray, (q * WIDTH**-0.5, k, v, -np.abs(g), beta, state)))


def milliseconds(form, inputs: tuple[jax.Array, ...]) -> float:
    """The fastest of several runs of a compiled form."""
    compiled = jax.jit(form)
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def main() -> None:
    """Prints a line for each length."""
    print("| tokens | chunk form | step form |\n| --- | --- | --- |")
    for tokens in map(int, sys.argv[1:] or ("4096", "32768")):
        inputs = arguments(tokens)
        chunk, step = milliseconds(kda_chunked, inputs), milliseconds(kda_recurrent, inputs)
        print(f"| {tokens:,} | {chunk:.1f} ms | {step:.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
