"""Comparing what a checkpoint holds with what its configuration asks for, before anything is allocated."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kimi_jax.checkpoint.names import LANGUAGE_PREFIX, StoredTensor, is_vision, stored_tensors, vision_tensors
from kimi_jax.checkpoint.safetensors_file import TensorInfo
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.config import ModelConfig

_MOST_LISTED = 10


@dataclass(frozen=True)
class NameReport:
    """Names of a checkpoint against its configuration; sorted."""

    matched: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]


def language_prefix(names: Iterable[str]) -> str:
    """`"language_model."` where a checkpoint's text tensors carry it, otherwise nothing."""
    return LANGUAGE_PREFIX if any(name.startswith(LANGUAGE_PREFIX) for name in names) else ""


def compare_names(config: ModelConfig, names: Iterable[str]) -> NameReport:
    """Every name against the configuration.

    The vision tower may be absent as a whole; without a `vision_config` its names are not judged.
    """
    found = set(names)
    prefix = language_prefix(found)
    wanted = {prefix + tensor.name for tensor in stored_tensors(config)}
    vision = {name for name in found if is_vision(name)}
    if config.vision is None:
        found -= vision
    elif vision:
        wanted |= {tensor.name for tensor in vision_tensors(config.vision)}
    found = {name for name in found if not (name.endswith(".weight_shape") and _packed_name(name) in wanted)}
    return NameReport(len(found & wanted), tuple(sorted(wanted - found)), tuple(sorted(found - wanted)))


def resolve_indexer(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The configuration with the indexer's sizes read off the tensors' shapes where the file left them out."""
    if config.indexer is None or not config.indexer.layers:
        return config
    prefix = f"{language_prefix(shapes)}model.layers.{config.indexer.layers[0]}.self_attn.indexer."
    heads, keys = shapes.get(f"{prefix}weights_proj.weight", ()), shapes.get(f"{prefix}wk.weight", ())
    for key, size, shape in (
        ("index_n_heads", config.indexer.num_heads, heads),
        ("index_head_dim", config.indexer.head_dim, keys),
    ):
        if size is None and len(shape) != 2:
            raise CheckpointError(
                f"dsa_config has no {key!r}, and no tensor of the indexer at {prefix}* tells it: add the key"
            )
    return config.with_indexer_sizes(heads[0] if heads else 0, keys[0] if keys else 0, f"{prefix}k_norm.bias" in shapes)


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, StoredTensor]:
    """Checks names, shapes and dtypes of all text tensors.

    **Returns:** the wanted tensors by their full names in the checkpoint.

    **Raises:** `CheckpointError` listing the first faults of each kind, each with tensor and file.
    """
    prefix = language_prefix(tensors)
    wanted = {prefix + tensor.name: tensor for tensor in stored_tensors(config)}
    kinds = [
        list(_missing(config, wanted, tensors)),
        list(_extra(config, wanted, tensors)),
        list(_wrong(wanted, tensors)),
    ]
    shown = [fault for kind in kinds for fault in kind[:_MOST_LISTED]]
    if shown:
        rest = sum(len(kind) for kind in kinds) - len(shown)
        raise CheckpointError("\n".join(shown) + (f"\n… and {rest} more" if rest else ""))
    return wanted


def _missing(
    config: ModelConfig, wanted: Mapping[str, StoredTensor], tensors: Mapping[str, TensorInfo]
) -> Iterable[str]:
    places = sorted({tensor.path.rpartition("/")[0] for tensor in tensors.values()})
    for name in wanted:
        if name not in tensors:
            why = ""
            base, _, kind = name.rpartition(".")
            if kind in ("weight_packed", "weight_scale") and f"{base}.weight" in tensors:
                why = f": the configuration says MXFP4, but {tensors[base + '.weight'].path} holds {base}.weight"
            elif kind == "weight" and f"{base}.weight_packed" in tensors:
                packed = tensors[f"{base}.weight_packed"]
                why = f": the configuration has no quantization_config, but {packed.path} holds {packed.name}"
            elif name.endswith("lm_head.weight"):
                why = ": the configuration has tie_word_embeddings false"
            yield f"missing tensor {name} in {', '.join(places)}{why}"


def _extra(config: ModelConfig, wanted: Mapping[str, StoredTensor], tensors: Mapping[str, TensorInfo]) -> Iterable[str]:
    for name, tensor in tensors.items():
        if name in wanted or is_vision(name) or _is_packed_shape(name, tensor, wanted):
            continue
        why = "the configuration has no such tensor"
        if name.endswith(("weight_packed", "weight_scale")) and not config.moe.packed:
            why = "the configuration has no quantization_config"
        elif name.endswith(("weight_global_scale", "input_global_scale")):
            why = "it belongs to NVFP4, only MXFP4 experts are supported"
        elif name.endswith("lm_head.weight"):
            why = "the configuration has tie_word_embeddings true"
        yield f"extra tensor {name} in {tensor.path}: {why}"


def _is_packed_shape(name: str, tensor: TensorInfo, wanted: Mapping[str, StoredTensor]) -> bool:
    """compressed-tensors may write the unpacked shape beside a packed weight: two whole numbers, not needed."""
    return name.endswith(".weight_shape") and _packed_name(name) in wanted and tensor.shape == (2,)


def _packed_name(name: str) -> str:
    return name.rpartition(".")[0] + ".weight_packed"


def _wrong(wanted: Mapping[str, StoredTensor], tensors: Mapping[str, TensorInfo]) -> Iterable[str]:
    for name, want in wanted.items():
        found = tensors.get(name)
        if found is None:
            continue
        if found.shape not in want.shapes:
            shapes = " or ".join(str(list(shape)) for shape in want.shapes)
            yield f"tensor {name} in {found.path}: shape {list(found.shape)}, wanted {shapes}"
        if found.dtype not in want.dtypes:
            yield (
                f"tensor {name} in {found.path}: dtype {found.dtype}, wanted {' or '.join(want.dtypes)}; "
                "convert the checkpoint"
            )
    yield from _mixed_experts(wanted, tensors)


def _mixed_experts(wanted: Mapping[str, StoredTensor], tensors: Mapping[str, TensorInfo]) -> Iterable[str]:
    first: dict[str, TensorInfo] = {}
    for name, want in wanted.items():
        found = tensors.get(name)
        if found is None or want.expert is None or want.param is None or found.dtype not in want.dtypes:
            continue
        other = first.setdefault(want.param, found)
        if other.dtype != found.dtype:
            yield (
                f"tensor {name} in {found.path}: dtype {found.dtype}, but {other.name} has {other.dtype}; "
                "the experts of one projection must share a dtype"
            )
