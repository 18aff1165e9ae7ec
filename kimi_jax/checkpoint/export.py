"""From a converted checkpoint back to the Hugging Face files it was made of, byte for byte."""

import math
from collections.abc import Iterator
from pathlib import Path

from kimi_jax.checkpoint.check import language_prefix
from kimi_jax.checkpoint.converted import ConvertedSource
from kimi_jax.checkpoint.manifest import (
    UNUSED,
    Progress,
    check_small_files,
    digest,
    durable_file,
    free_space,
    header_file,
    raw_bytes,
    small_file,
    write_durably,
)
from kimi_jax.checkpoint.names import StoredTensor, stored_tensors
from kimi_jax.checkpoint.safetensors_file import parse_header
from kimi_jax.checkpoint.storage import CheckpointError, local_destination


def export(directory: str | Path, out: str | Path, *, overwrite: bool = False, progress: Progress | None = None) -> int:
    """Writes the safetensors files that a converted checkpoint was made of, and the small files beside them.

    **Arguments:**

    - `directory`: a finished converted checkpoint. Every byte is compared with its digest on the way.
    - `out`: a new folder; with `overwrite`, files of the same names are replaced.
    - `progress`: called with the file's name, bytes done and bytes in all.

    **Returns:** the number of safetensors files.

    **Raises:** `CheckpointError` where the checkpoint is not finished or damaged, `out` is not empty, or its disk is
    too small.
    """
    directory, out = Path(directory), local_destination(out)
    source = ConvertedSource(directory)
    check_small_files(directory, source.manifest)
    files = {name: header_file(directory, name).read_bytes() for name in source.manifest.headers}
    tensors = {name: parse_header(str(header_file(directory, name)), data)[0] for name, data in files.items()}
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise CheckpointError(f"{out} is not empty; choose another folder, or give overwrite")
    out.mkdir(parents=True, exist_ok=True)
    total = sum(tensor.end - tensor.start for entries in tensors.values() for tensor in entries.values())
    free_space(out, total)
    prefix = language_prefix(name for entries in tensors.values() for name in entries)
    wanted = {prefix + tensor.name: tensor for tensor in stored_tensors(source.config)}
    done = 0
    for name, header in files.items():
        with durable_file(out / name) as file:
            file.write(header)
            for tensor in sorted(tensors[name].values(), key=lambda t: t.start):
                for piece in _pieces(source, tensor.name, wanted.get(tensor.name), math.prod(tensor.shape)):
                    file.write(piece)
                    done += piece.nbytes
                    if progress is not None:
                        progress(name, done, total)
    for name in source.manifest.files:
        write_durably(out / name, small_file(directory, name).read_bytes())
    return len(files)


def _pieces(source: ConvertedSource, name: str, wanted: StoredTensor | None, size: int) -> Iterator[memoryview]:
    """The bytes of a stored tensor of `size` elements, band by band, each proved."""
    if size == 0:
        return
    if wanted is None:
        record, param = source.records[UNUSED][name], name
    else:
        assert wanted.param is not None
        record, param = source.record(wanted.param), wanted.param
    bands: range = range(len(record.digests))
    if wanted is not None and wanted.expert is not None:
        bands = range(wanted.expert // record.rows, wanted.expert // record.rows + 1)
    for number in bands:
        data = source.read(param, record.band(number))
        if digest(data) != record.digests[number]:
            raise CheckpointError(f"{source.directory}: tensor {name}: the bytes differ from their digest: damaged")
        if wanted is not None and wanted.expert is not None:
            data = data[wanted.expert % record.rows]
        yield raw_bytes(data)
    if wanted is not None and wanted.expert is None:
        padding = size - math.prod(record.shape)
        yield memoryview(bytes(padding * record.itemsize))
