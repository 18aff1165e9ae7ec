"""Optimizers from a few numbers; anything else of optax can be handed to the trainer as it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import optax


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and its schedule: linear warm-up, then a cosine to `final_share` of the rate.

    - `steps` of a schedule are optimizer steps: with accumulation one for `accumulate` batches.
    """

    name: Literal["adamw", "muon"] = "adamw"
    """muon: for matrices, with adamw for everything else."""
    learning_rate: float = 2e-4
    """The highest one."""
    warmup_steps: int = 10
    """Optimizer steps until it is reached."""
    final_share: float = 0.1
    """What is left of it at the last step."""
    weight_decay: float = 0.0
    """Decoupled, as in adamw."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of adamw's two means."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them."""
    accumulate: int = 1
    """Batches whose gradients are averaged for one step."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("learning_rate", 0, inf),
            ("warmup_steps", 0, inf),
            ("final_share", 0, 1),
            ("weight_decay", 0, inf),
            ("clip_norm", 0, inf),
            ("accumulate", 1, inf),
        ):
            value = getattr(self, name)
            if not (least <= value <= most and value < inf):
                limit = "finite" if most == inf else f"at most {most}"
                raise ValueError(f"optimizer: {name} {value} must be at least {least} and {limit}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer: betas {self.betas} must lie in [0, 1)")

    def check_steps(self, steps: int) -> None:
        """Refuses a number of batches of which the last would wait for others. **Raises:** `ValueError`."""
        if steps % self.accumulate:
            raise ValueError(
                f"run: steps {steps} must be a multiple of the optimizer's accumulate {self.accumulate}: the last "
                f"{steps % self.accumulate} would train nothing"
            )


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by optimizer step, of `steps` batches in all."""
    updates = max(1, -(-steps // config.accumulate))
    warmup = min(config.warmup_steps, updates - 1)
    top = config.learning_rate
    return optax.warmup_cosine_decay_schedule(0.0 if warmup else top, top, warmup, updates, top * config.final_share)


def make_optimizer(
    config: OptimizerConfig, steps: int, matrices: Mapping[str, bool] | None = None
) -> optax.GradientTransformation:
    """The optimizer for a run of `steps` batches.

    `matrices`, for a flat tree of parameters: which are matrices. Muon takes these, with updates as large as adamw's
    (root mean square 0.2), and only they decay. None: muon takes everything of rank 2, and all parameters decay.
    """
    rate, (b1, b2) = schedule(config, steps), config.betas
    if config.name == "muon":
        sides = None
        if matrices is not None:
            stored = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
            sides = {name: stored if matrix else None for name, matrix in matrices.items()}
        step = optax.contrib.muon(
            rate,
            adam_b1=b1,
            adam_b2=b2,
            weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=sides,
            consistent_rms=None if matrices is None else 0.2,
        )
    else:
        step = optax.adamw(rate, b1, b2, weight_decay=config.weight_decay, mask=matrices)
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    whole = optax.chain(*clip, step)
    return whole if config.accumulate == 1 else optax.MultiSteps(whole, config.accumulate).gradient_transformation()
