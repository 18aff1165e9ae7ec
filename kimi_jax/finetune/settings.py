"""What a run does, read from a TOML file with one section a subject."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kimi_jax.config import ConfigError
from kimi_jax.finetune.optimizer import OptimizerConfig
from kimi_jax.finetune.targets import LoRAConfig

Settings = TypeVar("Settings")


def check_seed(seed: int) -> None:
    """Refuses what JAX takes for no seed. **Raises:** `ValueError`."""
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"run: seed {seed} must be at least 0 and below 2**63")


@dataclass(frozen=True)
class DataConfig:
    """Batches of tokens; see `kimi_jax.finetune.data`."""

    rows: int = 8
    """Rows of a batch, over all devices; the mesh axis data must divide them."""
    length: int = 2048
    """Tokens of a row."""
    packing: bool = True
    """Whether documents share rows; none sees anything of another."""
    shuffle: bool = True
    """Whether each epoch has an order of its own."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens of a conversation that count in the loss: the assistant's, or all."""
    thinking: bool | None = None
    """Whether conversations are rendered with thinking, where a line does not say; None as the chat format has it."""
    on_error: Literal["skip", "fatal"] = "skip"
    """What becomes of a broken line."""

    def __post_init__(self) -> None:
        for name in ("rows", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"data: {name} {getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class RunConfig:
    """How long a run is, and what it does on the way; all in steps, of one batch each."""

    steps: int = 1000
    """Batches in all."""
    seed: int = 0
    """Decides the first adapters, the order of the data and dropout."""
    evaluate_every: int = 100
    """Steps between evaluations of the held-out data; the last step has one too. 0: never."""
    save_every: int = 100
    """Steps between saves of adapters, optimizer and position in the data; the last step is saved too."""
    keep: int = 2
    """Saves that are kept."""
    drift_every: int = 1
    """Steps between comparisons of the router's choices with the base model's, each a forward pass. 0: never."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("evaluate_every", 0), ("save_every", 1), ("keep", 1), ("drift_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"run: {name} {getattr(self, name)} must be at least {least}")
        check_seed(self.seed)


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything about a run of fine-tuning but the model, its place and the files."""

    run: RunConfig = field(default_factory=RunConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)


def read_settings(path: str | Path, kind: type[Settings]) -> Settings:
    """A dataclass of dataclasses from a TOML file's sections; what the file leaves out has its default.

    **Raises:** `ConfigError` naming the file, the section and the field: unknown, of another type, or out of range.
    """
    try:
        table = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; wanted a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    return _from_table(kind, table, str(path))


def _from_table(kind: Any, table: Mapping[str, Any], where: str) -> Any:
    wanted = get_type_hints(kind)
    for name in table:
        if name not in wanted:
            raise ConfigError(f"{where}: unknown field {name!r}; there are {', '.join(wanted)}")
    values = {}
    for name, value in table.items():
        hint, place = wanted[name], f"{where}: {name}"
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{place}: found {value!r}, wanted a section [{name}]")
            values[name] = _from_table(hint, value, place)
        else:
            values[name] = _value(hint, value, place)
    missing = dataclasses.MISSING
    needed = [x.name for x in dataclasses.fields(kind) if x.default is missing and x.default_factory is missing]
    absent = [name for name in needed if name not in values]
    if absent:
        raise ConfigError(f"{where}: {', '.join(absent)} must be given")
    try:
        return kind(**values)
    except ValueError as error:
        section = where.rpartition(": ")[2]
        raise ConfigError(f"{where}: {str(error).removeprefix(f'{section}: ')}") from None


def _value(hint: Any, value: Any, place: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{place}: found {value!r}, wanted one of {', '.join(map(str, arguments))}")
        return value
    if origin in (Union, UnionType):
        (plain,) = (option for option in arguments if option is not type(None))
        return _value(plain, value, place)
    if origin is tuple:
        if not isinstance(value, list) or (arguments[-1] is not ... and len(value) != len(arguments)):
            raise ConfigError(f"{place}: found {value!r}, wanted a list")
        return tuple(_value(arguments[0], x, place) for x in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{place}: found {value!r}, wanted {hint.__name__}")
    return value
