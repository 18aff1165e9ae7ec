"""Comparing a converted checkpoint with its digests, and with the files it was made of."""

from pathlib import Path

import numpy as np

from kimi_jax.checkpoint.convert import plan_parts
from kimi_jax.checkpoint.converted import ConvertedSource, check_part
from kimi_jax.checkpoint.manifest import Progress, check_small_files
from kimi_jax.checkpoint.source import HuggingFaceSource
from kimi_jax.checkpoint.storage import CheckpointError


def verify(directory: str | Path, against: str | Path | None = None, progress: Progress | None = None) -> int:
    """Reads a finished converted checkpoint whole and compares every byte, small files and headers too.

    **Arguments:**

    - `directory`: the converted checkpoint.
    - `against`: the Hugging Face directory or URL it was made of; None compares with the digests alone.
    - `progress`: called with the part's name, bytes done and bytes in all.

    **Returns:** the number of arrays.

    **Raises:** `CheckpointError` naming the first tensor that differs, with the first differing element and both
    values where `against` is given.
    """
    source = ConvertedSource(Path(directory))
    check_small_files(source.directory, source.manifest)
    original = None if against is None else HuggingFaceSource(against)
    planned = (
        {} if original is None else {n: array for part in plan_parts(original).values() for n, array in part.items()}
    )
    names = {name for record in source.records.values() for name in record}
    if original is not None and names != planned.keys():
        odd = min(names ^ planned.keys())
        raise CheckpointError(f"array {odd} is only in {directory if odd in names else against}")
    if original is not None and original.config != source.config:
        raise CheckpointError(f"{directory} and {against} have different configurations")

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        return planned[name].read(index[0])

    total = sum(array.nbytes for record in source.records.values() for array in record.values())
    done = 0
    for part, record in source.records.items():
        for count in check_part(source.directory, part, record, None if original is None else read):
            done += count
            if progress is not None:
                progress(part, done, total)
    return len(names)
