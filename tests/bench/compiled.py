"""What is compiled for pods against what must be done: bytes moved over the floor, operations over the necessary ones.

    python tests/bench/compiled.py                # the three decode steps and the prefill of tests/bench/README.md
    python tests/bench/compiled.py v5p-64chips decode 64 1

The floor of a decode step is that of the pod's mesh, for one device: the weights that it holds and uses (experts with
rows, everything else but the embedding once), its rows' KDA states twice, their filled cache once. A mesh that holds
something twice moves it twice. Necessary operations: two for each number of a weight that a token uses, and attention.
"""

import sys

from kimi_jax.config import ModelConfig
from kimi_jax.planning.compile import Compiled, Step, compile_steps
from kimi_jax.planning.memory import place
from kimi_jax.planning.pods import Pod
from kimi_jax.planning.roofline import decode_steps

RUNS = (
    ("v5p-64chips", "decode", 64, 1),
    ("tpu7x-16chips", "decode", 8, 1),
    ("h200-16", "decode", 64, 1),
    ("v5p-64chips", "prefill", 8, 4096),
)


def floor(config: ModelConfig, pod: Pod, batch: int, context: int) -> float:
    """Bytes that one device must move in a decode step."""
    here, longer = (place(config, pod.mesh, tokens) for tokens in (context, 2 * context))
    cache = longer.conversation - here.conversation
    state = here.conversation - cache
    (step,) = decode_steps(config, [batch], context)
    (everything,) = decode_steps(config, [10**9], context)  # every expert is touched
    embedding = config.vocab_size * config.hidden_size * 2 / pod.mesh.get("tensor", 1)
    dense = here.weight_bytes - everything.expert_bytes / pod.devices - embedding
    return dense + step.expert_bytes / pod.devices + batch / here.groups * (2 * state + cache)


def main() -> None:
    """Compiles one after the other and prints a line each."""
    config = ModelConfig.from_file("kimi-k3")
    moe = config.moe
    given = sys.argv[1:]
    runs = [(given[0], given[1], int(given[2]), int(given[3]))] if given else RUNS
    for name, phase, batch, tokens in runs:
        pod = Pod.from_file(name)
        step = Step(phase, batch, tokens, pod.context)
        (found,) = compile_steps(config, pod, [step])
        if not isinstance(found, Compiled):
            print(f"{name}, {step.name}: {found.reason}")
            continue
        one_layer = 3 * moe.num_experts // pod.devices * moe.expert_width * config.expert_input * 2
        print(f"{name}, {step.name}: temporaries {found.temporaries / 1e9:.2f} GB ", end="")
        print(f"(one layer's dequantised experts {one_layer / 1e9:.2f}), ", end="")
        if phase == "decode":
            least = floor(config, pod, batch, pod.context)
            print(f"{found.bytes / 1e9:.1f} GB moved, floor {least / 1e9:.1f}: {found.bytes / least:.2f}", flush=True)
        else:
            (one,) = decode_steps(config, [1], tokens // 2)
            least = one.flops * batch * tokens / pod.devices
            print(
                f"{found.flops / 1e12:.1f} TFLOP, necessary {least / 1e12:.1f}: {found.flops / least:.2f}", flush=True
            )


if __name__ == "__main__":
    main()
