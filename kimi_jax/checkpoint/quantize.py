"""From float experts to the layout in which K3 is published: MXFP4, packed, with scales. All else stays as it is."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax.checkpoint.manifest import Progress
from kimi_jax.checkpoint.names import is_stacked
from kimi_jax.checkpoint.rewrite import Replacement, new_folder, open_source, rewrite
from kimi_jax.checkpoint.source import HuggingFaceSource
from kimi_jax.checkpoint.storage import CheckpointError, read_bytes
from kimi_jax.config import ConfigError, ModelConfig
from kimi_jax.ops.mxfp4 import GROUP, dequantize_on_host, quantize

QUANTIZATION_CONFIG: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""The field `quantization_config` as K3's configuration has it."""


def quantize_checkpoint(
    directory: str | Path, out: str | Path, *, progress: Progress | None = None
) -> dict[int, float]:
    """Writes a checkpoint whose routed experts are MXFP4, from one whose experts are bfloat16 or float32.

    Each `….experts.N.w1.weight` becomes `weight_packed` and `weight_scale` (see `kimi_jax.ops.mxfp4.quantize` for the
    rounding), and `config.json` says so. Files, other tensors and small files stay as they are. One tensor is in memory
    at a time.

    **Arguments:**

    - `directory`: a Hugging Face directory or its URL. `out`: a new directory.
    - `progress`: called with the file's name, bytes written and bytes in all.

    **Returns:** for each layer with experts (0-based) the error of its experts, ‖Q(W) − W‖ / ‖W‖.

    **Raises:** `ConfigError` where a width of the experts is not a multiple of 32; `CheckpointError` where the experts
    are packed already, hold NaN or infinity (naming the tensor and its file), the source is not whole, `out` is not
    empty, or its disk is too small. After an error nothing is left in `out`.
    """
    out = new_folder(out)
    source = open_source(directory)
    if source.config.moe.packed:
        raise CheckpointError(f"{source.folder}: the experts are MXFP4 already")
    config = packed_config(source)
    sums: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(2))
    experts = {name: t for name, t in source.wanted.items() if t.param is not None and is_stacked(t.param)}
    replaced = {}
    for name, tensor in experts.items():
        rows, width = source.files.tensors[name].shape
        base = name.removesuffix(".weight")
        replaced[name] = Replacement(
            {
                f"{base}.weight_packed": ("U8", (rows, width // 2)),
                f"{base}.weight_scale": ("U8", (rows, width // GROUP)),
            },
            partial(_quantized, source, name, sums[int(str(tensor.param).split(".")[1])]),
        )
    rewrite(source, out, replaced, small={"config.json": config}, progress=progress)
    return {layer: math.sqrt(error / size) if size else 0.0 for layer, (error, size) in sorted(sums.items())}


def _quantized(source: HuggingFaceSource, name: str, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scales of a stored tensor; adds the squares of errors and weights to `sums`."""
    weight = source.files.read(name).astype(np.float32)
    if not np.isfinite(weight).all():
        row, column = np.argwhere(~np.isfinite(weight))[0]
        raise CheckpointError(
            f"tensor {name} in {source.files.tensors[name].path}: {weight[row, column]} at [{row}, {column}]: "
            "only finite numbers can be quantised"
        )
    packed, scale = quantize(weight)
    error = dequantize_on_host(packed, scale).astype(np.float64) - weight
    sums += np.sum(error**2), np.sum(weight.astype(np.float64) ** 2)
    return packed, scale


def packed_config(source: HuggingFaceSource) -> bytes:
    """The `config.json` of a checkpoint, saying that its experts are MXFP4.

    **Raises:** `ConfigError` where their widths are not multiples of 32.
    """
    raw = json.loads(read_bytes(source.folder.file("config.json")))
    text = raw["text_config"] if isinstance(raw.get("text_config"), Mapping) else raw
    text["quantization_config"] = QUANTIZATION_CONFIG
    try:
        ModelConfig.from_dict(raw)
    except ConfigError as error:
        raise ConfigError(f"{source.folder}/config.json: {error}") from None
    return json.dumps(raw, indent=2, ensure_ascii=False).encode()
