"""Which tensor goes where: the names, shapes and dtypes of a Hugging Face checkpoint, from the configuration.

Our names are the checkpoint's without the prefixes `language_model.` and `model.`; the tensors of the experts of
one projection are stacked into one array.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from kimi_jax.config import ModelConfig, VisionConfig
from kimi_jax.model.model import abstract_params

LANGUAGE_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
_EXPERTS = ".experts."


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    - `name`: without `language_model.`.
    - `param`: the parameter of ours it belongs to; None for vision tensors.
    - `expert`: its place on the stacked axis, None where nothing is stacked.
    - `shapes`: shapes it may have, the published one first.
    - `dtypes`: safetensors dtypes it may have, the published one first.
    """

    name: str
    param: str | None
    expert: int | None
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


def stored_name(param: str, expert: int | None = None) -> str:
    """The checkpoint's name (without `language_model.`) of a parameter, or of one expert's share of it."""
    name = param if param.startswith("lm_head.") else f"model.{param}"
    if expert is None:
        return name
    block, projection = name.split(_EXPERTS)
    return f"{block}{_EXPERTS}{expert}.{projection}"


def is_stacked(param: str) -> bool:
    """Whether a parameter stacks one tensor of every expert."""
    return _EXPERTS in param


def stored_tensors(config: ModelConfig) -> Iterator[StoredTensor]:
    """Every text tensor that a checkpoint of this configuration must hold."""
    for param, (declared, _) in abstract_params(config).items():
        dtype = {"uint8": "U8", "float32": "F32", "bfloat16": "BF16"}[declared.dtype.name]
        dtypes = ("U8",) if dtype == "U8" else (dtype, "BF16" if dtype == "F32" else "F32")
        make = partial(StoredTensor, param=param, dtypes=dtypes)
        if is_stacked(param):
            for expert in range(declared.shape[0]):
                yield make(name=stored_name(param, expert), expert=expert, shapes=(declared.shape[1:],))
        else:
            shapes = stored_shapes(config, param, declared.shape)
            yield make(name=stored_name(param), expert=None, shapes=shapes)


def stored_shapes(config: ModelConfig, param: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes that a parameter which stacks nothing may have in a checkpoint, the published one first."""
    if param.endswith(".A_log"):
        # One number a head; K3 pads it with zeros to the head width, Kimi-Linear keeps the axes it broadcasts to.
        (heads,) = shape
        padded, spread = (max(heads, config.kda.head_dim),), (1, 1, heads, 1)
        return (padded, shape, spread) if config.wrapped else (spread, shape, padded)
    if "_conv1d." in param:
        channels, taps = shape
        return ((channels, 1, taps), shape)
    return (shape,)


def vision_tensors(vision: VisionConfig) -> Iterator[StoredTensor]:
    """The tensors of the vision tower and projector, bfloat16."""
    width, inner, mlp = vision.hidden_size, vision.attention_width, vision.intermediate_size
    merged = width * vision.merge * vision.merge
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj": (width, 3, vision.patch_size, vision.patch_size),
        "vision_tower.patch_embed.pos_emb": (vision.table_height, vision.table_width, width),
        "vision_tower.encoder.final_layernorm": (width,),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (vision.text_hidden_size, merged),
        "mm_projector.post_norm": (vision.text_hidden_size,),
    }
    block = {
        "wqkv": (3 * inner, width),
        "wo": (width, inner),
        "mlp.fc0": (mlp, width),
        "mlp.fc1": (width, mlp),
        "norm0": (width,),
        "norm1": (width,),
    }
    for i in range(vision.num_layers):
        shapes |= {f"vision_tower.encoder.blocks.{i}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        yield StoredTensor(f"{name}.weight", None, None, (shape,), ("BF16",))


def is_vision(name: str) -> bool:
    """Whether a checkpoint's tensor belongs to the vision tower or its projector."""
    return name.startswith(VISION_PREFIXES)
