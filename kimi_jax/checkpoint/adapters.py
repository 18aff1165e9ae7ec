"""Adapters in the form of the PEFT library: `adapter_config.json` beside `adapter_model.safetensors`.

**Tensors.** `base_model.model.` + the module's name in the checkpoint + `.lora_A.weight` `[r, in]` or `.lora_B.weight`
`[out, r]`: `base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight`, for K3
`base_model.model.language_model.model.layers.3…`. Routed experts have theirs each:
`….block_sparse_moe.experts.7.w1.lora_A.weight`.

**Names.** transformers' own Kimi-Linear calls some modules otherwise (`mlp.shared_experts` for
`block_sparse_moe.shared_experts`, `self_attn.forget_gate.f_a_proj` for `self_attn.f_a_proj`). PEFT renames the tensors
of a checkpoint's names as transformers renames the weights; what the configuration targets is written so that it fits
both. Both are read. There the routed experts are no modules but two arrays: see `fused_adapters`.

**Targets.** `target_modules` is a list of name endings where every module of these endings has an adapter, otherwise
one regular expression. `r` and `lora_alpha` are those of most modules, `rank_pattern` and `alpha_pattern` have the
others; an adapter's scale is alpha / r, or alpha / √r with `use_rslora`.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kimi_jax.checkpoint.fused_adapters import fused_kind, fused_layer, fused_targets, split_pair
from kimi_jax.checkpoint.manifest import write_durably
from kimi_jax.checkpoint.names import LANGUAGE_PREFIX, is_stacked, stored_name
from kimi_jax.checkpoint.safetensors_file import SafetensorsFile
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.checkpoint.write import write_tensors
from kimi_jax.config import ConfigError, ModelConfig, read_json_object
from kimi_jax.model.adapters import half_shapes
from kimi_jax.model.lora import HALVES, AdapterSpec, adaptable
from kimi_jax.model.transformer import Transformer

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"base_model\.model\.(?P<path>.+)\.(?P<half>lora_[AB])\.weight")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
_DTYPES = ("F32", "BF16", "F16")
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"}
# Fields that do not change what the adapters compute.
_NEUTRAL = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "lora_dropout"),
    *(
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
    ),
}
# Ways to begin a training that change the weights below the adapters.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def adapter_folder(directory: str | Path) -> Path:
    """The folder of the adapters: `directory`, or `adapters` in it, as a training run has it.

    **Raises:** `CheckpointError` where neither holds an `adapter_config.json`.
    """
    for folder in (Path(directory), Path(directory) / "adapters"):
        if (folder / CONFIG).is_file():
            return folder
    raise CheckpointError(f"{directory} holds no adapters: there is no {CONFIG}, nor one in {directory}/adapters")


def write_adapters(
    directory: str | Path,
    config: ModelConfig,
    spec: AdapterSpec,
    arrays: Mapping[str, np.ndarray],
    *,
    base_model: str | None = None,
) -> None:
    """Writes adapters as PEFT does; files of the same names are replaced.

    **Arguments:**

    - `config`: of the model below them. `spec`: which modules have them, with rank and scale.
    - `arrays`: float32, by the names of `half_shapes`, one layer each.
    - `base_model`: where the model below is found, for those who read the adapters.

    **Raises:** `ValueError` naming an array that is missing, extra, or of another shape than `spec` says.
    """
    directory = Path(directory)
    shapes = half_shapes(config, spec)
    for name in {**shapes, **arrays}:
        found = arrays[name].shape if name in arrays else None
        if found != shapes.get(name):
            raise ValueError(f"adapter array {name} has the shape {found}, wanted {shapes.get(name)}")
    tensors: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        module, _, half = name.rpartition(".")
        if is_stacked(name):
            tensors |= {f"{_path(config, module, i)}.{half}.weight": one for i, one in enumerate(array)}
        else:
            tensors[f"{_path(config, module)}.{half}.weight"] = array
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / WEIGHTS, {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()})
    write_durably(directory / CONFIG, json.dumps(_describe(config, spec, base_model), indent=2).encode())


def _path(config: ModelConfig, module: str, expert: int | None = None) -> str:
    prefix = LANGUAGE_PREFIX if config.wrapped else ""
    return _PREFIX + prefix + stored_name(f"{module}.weight", expert).removesuffix(".weight")


def _describe(config: ModelConfig, spec: AdapterSpec, base_model: str | None) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    ranks = {name: rank for name, rank, _ in spec.modules}
    alphas = {name: _number(rank * scale) for name, rank, scale in spec.modules}
    (rank, _), *_ = Counter(ranks.values()).most_common(1)
    (alpha, _), *_ = Counter(alphas.values()).most_common(1)
    kinds = _by_kind(adaptable_names(config))
    chosen = _by_kind(ranks)
    whole = all(len(chosen[kind]) == len(kinds[kind]) for kind in chosen)
    fused = [] if config.wrapped else list(fused_targets(spec))
    ranks_there = ranks | {name: rank for name, rank, _ in fused}
    alphas_there = alphas | {name: _number(rank * scale) for name, rank, scale in fused}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": sorted(map(_ending, chosen)) if whole else rf"(?:.*\.)?(?:{_regex(ranks)})",
        "target_parameters": [name for name, _, _ in fused] or None,
        "rank_pattern": _patterns(ranks_there, rank),
        "alpha_pattern": _patterns(alphas_there, alpha),
    }


def _number(x: float) -> int | float:
    return int(x) if float(x).is_integer() else x


def _by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Layers' numbers, as text, of each kind of module; `lm_head` has none."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        head, _, tail = name.partition(".")
        layer, _, kind = tail.partition(".")
        kinds[kind if head == "layers" else name].append(layer)
    return kinds


def _ending(kind: str) -> str:
    """A name ending that only modules of this kind have, in the checkpoint and in transformers."""
    if is_stacked(kind) or kind in ("self_attn.f_a_proj", "self_attn.f_b_proj"):
        return kind.rpartition(".")[2]
    return kind.replace("block_sparse_moe.shared_experts.", "shared_experts.")


def _regex(names: Iterable[str]) -> str:
    """A pattern of modules' names, in the checkpoint and in transformers, behind what stands before `layers`."""
    found = []
    for kind, layers in _by_kind(names).items():
        pattern = re.escape(kind)
        pattern = pattern.replace(r"block_sparse_moe\.shared_experts", r"(?:block_sparse_moe|mlp)\.shared_experts")
        pattern = pattern.replace(r"block_sparse_moe\.experts\.", r"block_sparse_moe\.experts\.\d+\.")
        pattern = re.sub(r"self_attn\\\.(f_[ab]_proj)", r"self_attn\\.(?:forget_gate\\.)?\1", pattern)
        found.append(rf"layers\.(?:{'|'.join(layers)})\.{pattern}" if layers != [""] else pattern)
    return "|".join(found)


def _patterns(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """Patterns of the modules whose value is not the usual one."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, value in values.items():
        if value != usual:
            groups[value].append(name)
    return {f"(?:{_regex(names)})": value for value, names in groups.items()}


@cache
def adaptable_names(config: ModelConfig) -> tuple[str, ...]:
    """The modules of a model that can have an adapter."""
    return tuple(name for name, _ in adaptable(Transformer(config, jnp.dtype(jnp.bfloat16))))


def read_adapters(directory: str | Path, config: ModelConfig) -> tuple[AdapterSpec, dict[str, np.ndarray]]:
    """Reads adapters in PEFT's form, made by `write_adapters` or by PEFT itself.

    **Arguments:**

    - `directory`: a folder with `adapter_config.json`, or a run's with `adapters` in it.
    - `config`: of the model that they are for.

    **Returns:** their specification, and float32 arrays by the names of `half_shapes`.

    **Raises:** `CheckpointError` naming file and field where the adapters are of a kind that is not supported; naming
    file and tensor where one is unknown, has no counterpart, has another shape than the model and the configuration
    want, or belongs to a module that the model does not have.
    """
    folder = adapter_folder(directory)
    settings = _Settings(folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder / WEIGHTS} does not exist; adapters in PyTorch's own format are not read")
    file = SafetensorsFile(folder / WEIGHTS)
    parts: dict[str, dict[int | None, str]] = defaultdict(dict)
    chosen: dict[str, tuple[int, float]] = {}
    names = set(adaptable_names(config))
    fused: set[str] = set()
    for tensor in file.tensors:
        found = _TENSOR.fullmatch(tensor)
        if found is None:
            raise CheckpointError(f"{file.file}: tensor {tensor} is not half an adapter of a module")
        if fused_layer(found["path"]) is not None:
            fused.add(found["path"])
            continue
        module, expert = _module(found["path"])
        if module not in names or is_stacked(module) is not (expert is not None):
            raise CheckpointError(
                f"{file.file}: tensor {tensor}: the model has no such module that can have an adapter"
            )
        own = settings.rank_and_scale(found["path"])
        if chosen.setdefault(module, own) != own:
            raise CheckpointError(f"{folder / CONFIG}: the experts of {module} differ in rank or alpha")
        parts[f"{module}.{found['half']}"][expert] = tensor
    arrays: dict[str, np.ndarray] = {}
    for path in fused:
        for name, own, array in _read_fused(file, settings, config, path):
            module = name.rpartition(".")[0]
            if module not in names or (chosen.setdefault(module, own) != own) or name in parts or name in arrays:
                raise CheckpointError(f"{file.file}: {path} has adapters of {module}: not in the model, or given twice")
            arrays[name] = array
    spec = AdapterSpec(tuple((module, *own) for module, own in chosen.items()))
    for name, shape in half_shapes(config, spec).items():
        if name in arrays:
            continue
        wanted = range(shape[0]) if is_stacked(name) else (None,)
        own_shape = shape[1:] if is_stacked(name) else shape
        arrays[name] = np.empty(shape, np.float32)
        for expert in wanted:
            tensor = _present(file, config, parts[name], name, expert)
            _check(file, tensor, own_shape)
            arrays[name][... if expert is None else expert] = file.read(tensor).astype(np.float32)
        extra = parts[name].keys() - set(wanted)
        if extra:
            raise CheckpointError(
                f"{file.file}: tensor {parts[name][min(extra, key=str)]}: the model has {len(wanted)} experts"
            )
    return spec, arrays


def _read_fused(
    file: SafetensorsFile, settings: "_Settings", config: ModelConfig, path: str
) -> Iterator[tuple[str, tuple[int, float], np.ndarray]]:
    """Name, rank and scale, and numbers of each stacked half in a pair that is of all experts of a layer."""
    before, layer = fused_layer(path) or ("", "")
    names = [f"{_PREFIX}{path}.{half}.weight" for half in HALVES]
    for name in names:
        if name not in file.tensors:
            raise CheckpointError(f"{file.file}: tensor {name} is missing, though the other half is there")
    kind = fused_kind(config, *(file.tensors[name].shape for name in names))
    if kind is None:
        shapes = " and ".join(str(list(file.tensors[name].shape)) for name in names)
        raise CheckpointError(f"{file.file}: tensors of {path}: shapes {shapes} are of no array of the model's experts")
    own = settings.rank_and_scale(f"{before}{layer}{kind}")
    for name, axis in zip(names, (0, 1), strict=True):
        wanted = list(file.tensors[name].shape)
        wanted[axis] = config.moe.num_experts * own[0]
        _check(file, name, tuple(wanted))
    pair = (file.read(name).astype(np.float32) for name in names)
    for tail, array in split_pair(config, kind, *pair).items():
        yield f"{layer}block_sparse_moe.experts.{tail}", own, array


def _module(path: str) -> tuple[str, int | None]:
    """Our name of a module, from the checkpoint's or transformers'; of a routed expert also its number."""
    name = path.removeprefix(LANGUAGE_PREFIX).removeprefix("model.")
    name = name.replace(".mlp.shared_experts.", ".block_sparse_moe.shared_experts.").replace(".forget_gate.", ".")
    found = _EXPERT.fullmatch(name)
    return (name, None) if found is None else (f"{found[1]}.{found[3]}", int(found[2]))


def _present(
    file: SafetensorsFile, config: ModelConfig, tensors: Mapping[int | None, str], name: str, expert: int | None
) -> str:
    if expert not in tensors:
        module, _, half = name.rpartition(".")
        other = next(other for other in HALVES if other != half)
        raise CheckpointError(
            f"{file.file}: tensor {_path(config, module, expert)}.{half}.weight is missing, though the module, or "
            f"another expert of it, has a {half} or {other}"
        )
    return tensors[expert]


def _check(file: SafetensorsFile, tensor: str, shape: tuple[int, ...]) -> None:
    found = file.tensors[tensor]
    if found.shape != shape:
        raise CheckpointError(f"{file.file}: tensor {tensor}: shape {list(found.shape)}, wanted {list(shape)}")
    if found.dtype not in _DTYPES:
        raise CheckpointError(f"{file.file}: tensor {tensor}: dtype {found.dtype}, wanted {', '.join(_DTYPES)}")


class _Settings:
    """What `adapter_config.json` says of ranks and scales."""

    def __init__(self, path: Path) -> None:
        try:
            self.raw = read_json_object(path)
        except ConfigError as error:
            raise CheckpointError(str(error)) from None
        self.path = path
        raw = self.raw
        if raw.get("peft_type") != "LORA":
            raise CheckpointError(f"{path}: peft_type {raw.get('peft_type')!r} is not supported, only 'LORA'")
        start = raw.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise CheckpointError(
                f"{path}: init_lora_weights {start!r} is not supported: it changes the weights below the adapters"
            )
        for field, value in raw.items():
            if field not in _READ | _NEUTRAL and value and (field, value) != ("bias", "none"):
                raise CheckpointError(f"{path}: field '{field}': {value!r} is not supported")
        for field in ("r", "lora_alpha"):
            self._positive(field, raw.get(field))
        for field in ("rank_pattern", "alpha_pattern"):
            if not isinstance(raw.get(field) or {}, dict):
                raise CheckpointError(f"{path}: field '{field}' must be an object, found {raw[field]!r}")

    def _positive(self, field: str, value: Any) -> Any:
        whole = field in ("r", "rank_pattern")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 < value < math.inf:
            kind = "a whole number from 1 on" if whole else "a positive number"
            raise CheckpointError(f"{self.path}: field '{field}' must be {kind}, found {value!r}")
        return value

    def _of(self, path: str, field: str, usual: str) -> Any:
        """The value for the module at `path`: of the first pattern that its whole name, or the end of it, fits."""
        for pattern, value in (self.raw.get(field) or {}).items():
            try:
                fits = re.match(rf"(.*\.)?({pattern})$", path)
            except re.error as error:
                raise CheckpointError(f"{self.path}: field '{field}': {pattern!r} is no pattern: {error}") from None
            if fits:
                return self._positive(field, value)
        return self.raw[usual]

    def rank_and_scale(self, path: str) -> tuple[int, float]:
        """Rank and scale of the adapter of the module at `path`, as it stands in the tensors' names."""
        rank, alpha = self._of(path, "rank_pattern", "r"), self._of(path, "alpha_pattern", "lora_alpha")
        return rank, alpha / (math.sqrt(rank) if self.raw.get("use_rslora") else rank)
