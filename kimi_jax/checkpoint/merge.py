"""Adapters merged into the weights: a Hugging Face checkpoint that needs none.

A module's new weight is `W + scale · B A`, summed in float64 and rounded once to the dtype that is stored. In MXFP4 the
numbers of a group stand a twelfth to a third of the largest apart, and most updates are smaller: merging into such
experts happens on request only, and a layer's *survival* tells what is left,

    1 − ‖ΔW − (Q(W + ΔW) − W)‖² / ‖ΔW‖²

over all its experts: 1 where the update is there whole, 0 where nothing of it is (or noise of its size is).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from kimi_jax.checkpoint.adapters import adapter_folder, read_adapters
from kimi_jax.checkpoint.manifest import Progress
from kimi_jax.checkpoint.names import StoredTensor, is_stacked
from kimi_jax.checkpoint.rewrite import Replacement, new_folder, open_source, rewrite
from kimi_jax.checkpoint.source import HuggingFaceSource
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.ops.mxfp4 import dequantize_on_host, quantize

LEAST_SURVIVAL = 0.5
"""Of a layer's experts in MXFP4; a merge that leaves less is refused."""
PIECE = 1 << 22
"""Elements of a weight that are computed at once."""


@dataclass(frozen=True)
class Merged:
    """What a merge did.

    - `modules`: number of modules that changed, the experts of one projection counted as one.
    - `survival`: of the update of MXFP4 experts, by 0-based layer; see this module's text.
    """

    modules: int
    survival: dict[int, float]


def merge(
    directory: str | Path,
    adapters: str | Path,
    out: str | Path,
    *,
    experts: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Merged:
    """Writes a checkpoint with adapters merged into its weights; other tensors and files are copied.

    **Arguments:**

    - `directory`: the Hugging Face checkpoint below the adapters, or its URL.
    - `adapters`: a folder with adapters in PEFT's form, or a training run with `adapters` in it.
    - `out`: a new directory.
    - `experts`: merge into MXFP4 experts too, with rounding. (Experts in bfloat16 or float32 need no leave.)
    - `force`: write also where less than `LEAST_SURVIVAL` of a layer's update survives that rounding.
    - `progress`: called with the file's name, bytes written and bytes in all.

    **Raises:** `CheckpointError` where the adapters do not fit the model (see `read_adapters`) or hold NaN or infinity,
    there are some of MXFP4 experts and `experts` is not given, too little survives, `out` is not empty, its disk is too
    small, or the checkpoint is not whole. After an error nothing is left in `out`.
    """
    out = new_folder(out)
    source = open_source(directory)
    folder = adapter_folder(adapters)
    spec, arrays = read_adapters(folder, source.config)
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise CheckpointError(f"{folder}: the adapter array {name} holds NaN or infinity")
    scales = {name: scale for name, _, scale in spec.modules}
    packed = sorted(name for name in scales if is_stacked(name) and source.config.moe.packed)
    if packed and not experts:
        raise CheckpointError(
            f"{folder} has adapters of {len(packed)} projections of MXFP4 experts ({packed[0]}, …): merging rounds "
            "their updates, and most or all may be lost; ask for it with --experts, or go on using the adapters"
        )
    updates = _Updates(source, scales, arrays)
    replaced = {}
    for name, tensor in source.wanted.items():
        module, _, kind = str(tensor.param).rpartition(".")
        if module in scales:
            make = (
                partial(updates.packed, name, tensor, kind)
                if module in packed
                else partial(updates.dense, name, tensor)
            )
            stored = source.files.tensors[name]
            replaced[name] = Replacement({name: (stored.dtype, stored.shape)}, make)
    rewrite(source, out, replaced, check=None if force else updates.check, progress=progress)
    return Merged(len(scales), updates.survival())


@dataclass
class _Updates:
    """The weights with their updates, tensor by tensor, and what MXFP4 lost of them.

    - `sums`: by layer, squares of what is lost and of the updates.
    """

    source: HuggingFaceSource
    scales: Mapping[str, float]
    arrays: Mapping[str, np.ndarray]
    sums: dict[int, np.ndarray] = field(default_factory=dict)
    _last: tuple[str, dict[str, np.ndarray]] = ("", {})
    _counted: set[str] = field(default_factory=set)

    def _change(self, tensor: StoredTensor, rows: slice = slice(None)) -> np.ndarray:
        """`scale · B A` of rows of a stored weight, float64."""
        module = str(tensor.param).rpartition(".")[0]
        a, b = (self.arrays[f"{module}.{half}"] for half in ("lora_A", "lora_B"))
        if tensor.expert is not None:
            a, b = a[tensor.expert], b[tensor.expert]
        return self.scales[module] * (b[rows].astype(np.float64) @ a.astype(np.float64))

    def dense(self, name: str, tensor: StoredTensor) -> Iterator[np.ndarray]:
        """Bands of the new weight in the stored dtype."""
        height, width = self.source.files.tensors[name].shape
        step = max(1, PIECE // width)
        for start in range(0, height, step):
            rows = slice(start, min(start + step, height))
            weight = self.source.files.read(name, rows)
            yield rounded_once(weight.astype(np.float64) + self._change(tensor, rows), weight.dtype)

    def packed(self, name: str, tensor: StoredTensor, kind: str) -> Iterator[np.ndarray]:
        """The new codes or scales (`kind`) of one expert's projection."""
        base = name.removesuffix(kind)
        if self._last[0] != base:
            codes, scale = (self.source.files.read(f"{base}{part}") for part in ("weight_packed", "weight_scale"))
            old = dequantize_on_host(codes, scale).astype(np.float64)
            change = self._change(tensor)
            new = dict(zip(("weight_packed", "weight_scale"), quantize((old + change).astype(np.float32)), strict=True))
            self._last = base, new
            lost = change - (dequantize_on_host(*new.values()).astype(np.float64) - old)
            if base not in self._counted:  # codes and scales may stand in either order, and apart
                self._counted.add(base)
                sums = self.sums.setdefault(int(str(tensor.param).split(".")[1]), np.zeros(2))
                sums += np.sum(lost**2), np.sum(change**2)
        yield self._last[1][kind]

    def survival(self) -> dict[int, float]:
        """By layer; of no update nothing is lost."""
        return {layer: 1 - lost / all_ if all_ else 1.0 for layer, (lost, all_) in sorted(self.sums.items())}

    def check(self) -> None:
        """**Raises:** `CheckpointError` where too little of a layer's update is left."""
        low = {layer: share for layer, share in self.survival().items() if not share >= LEAST_SURVIVAL}
        if low:
            shown = ", ".join(f"layer {layer}: {share:.1%}" for layer, share in list(low.items())[:8])
            raise CheckpointError(
                f"less than {LEAST_SURVIVAL:.0%} of the update of MXFP4 experts survives rounding in {len(low)} of "
                f"{len(self.sums)} layers ({shown}{', …' if len(low) > 8 else ''}); nothing is written: go on using "
                "the adapters, merge into experts in bfloat16, or force it with --force"
            )


def rounded_once(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 numbers rounded to the nearest of `dtype`, ties to even.

    NumPy takes the way over float32 to bfloat16, which rounds twice. Here float32 keeps, in its last bit, whether
    anything was cut off (rounding to odd), so that the second rounding sees on which side of a tie a number was.
    """
    if dtype != ml_dtypes.bfloat16:
        return x.astype(dtype)
    near = x.astype(np.float32)
    even = (near.view(np.uint32) & 1) == 0
    towards = np.where(x > near, np.inf, -np.inf).astype(np.float32)
    odd = np.nextafter(near, towards)
    return np.where((near != x) & even & np.isfinite(near), odd, near).astype(dtype)
