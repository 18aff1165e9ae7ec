"""What a training of a whole model is made of, read from a TOML file."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from kimi_jax.config import ConfigError

OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True)
class Recipe:
    """A training run; `configs/finetune/pretrain-tiny.toml` is one.

    - `model`: a `config.json` in the published format, or a shipped name.
    - `text`, `held_out`: files of text; empty lines end documents, which are joined with `[EOS]` between them.
    - `tokenizer`: a directory with `tiktoken.model`.
    - `sequence`: tokens of a row that are predicted. `batch`: rows of a step.
    - `steps`, `warmup`: steps in all, and those in which the learning rate rises; then it falls along a cosine to
        `final_rate` of `learning_rate`.
    - `optimizer`: "adamw", or "muon" for matrices with adamw for the rest.
    - `weight_decay`: of matrices. `clip`: largest norm of all gradients together.
    - `bias_rate`: step of the router's bias, see `kimi_jax.finetune.balance`.
    - `seed`: of the first values and of the order of rows.
    - `log_every`, `evaluate_every`, `save_every`: in steps.
    """

    model: str
    text: tuple[str, ...]
    held_out: tuple[str, ...]
    tokenizer: str
    sequence: int
    batch: int
    steps: int
    warmup: int
    learning_rate: float
    final_rate: float = 0.1
    optimizer: OptimizerName = "muon"
    weight_decay: float = 0.0
    clip: float = 1.0
    bias_rate: float = 1e-3
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 100
    save_every: int = 100

    def __post_init__(self) -> None:
        for name in ("sequence", "batch", "steps", "log_every", "evaluate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"field {name!r}: {getattr(self, name)} must be at least 1")
        if not 0 <= self.warmup <= self.steps:
            raise ConfigError(f"field 'warmup': {self.warmup} must lie between 0 and the {self.steps} steps")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"field {name!r}: {getattr(self, name)} must be above 0")
        if self.optimizer not in get_args(OptimizerName):
            raise ConfigError(f"field 'optimizer': {self.optimizer!r} is none of {', '.join(get_args(OptimizerName))}")

    @classmethod
    def from_file(cls, path: str | Path) -> "Recipe":
        """Reads a recipe. **Raises:** `ConfigError` naming the field that is missing, unknown or of another type."""
        path = Path(path)
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: not a readable TOML file: {error}") from None
        kinds = {field.name: field.type for field in fields(cls)}
        missing = [field.name for field in fields(cls) if field.name not in raw and field.default is _NO_DEFAULT]
        for name in (*missing, *(name for name in raw if name not in kinds)):
            raise ConfigError(f"{path}: field {name!r} is {'missing' if name in missing else 'unknown'}")
        values = {name: _value(f"{path}: field {name!r}", kinds[name], value) for name, value in raw.items()}
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


_NO_DEFAULT = fields(Recipe)[0].default


def _value(where: str, kind: object, value: object) -> object:
    if kind is int and type(value) is int:
        return value
    if kind is float and type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]
    if kind in (str, OptimizerName) and isinstance(value, str):
        return value
    if kind == tuple[str, ...] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    wanted = {int: "a whole number", float: "a number", tuple[str, ...]: "a list of strings"}.get(kind, "a string")  # type: ignore[call-overload]
    raise ConfigError(f"{where}: {value!r} must be {wanted}")
