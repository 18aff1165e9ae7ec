"""`kimi-jax inspect`: what a configuration amounts to, and whether a checkpoint is what it should be."""

import gzip
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from kimi_jax.checkpoint.check import NameReport, check_tensors, compare_names, resolve_indexer
from kimi_jax.checkpoint.converted import ConvertedSource
from kimi_jax.checkpoint.manifest import is_converted
from kimi_jax.checkpoint.safetensors_file import CheckpointFiles, read_index
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.cli.output import CommandError, UsageError, console, print_table
from kimi_jax.config import ConfigError, ModelConfig, find_config
from kimi_jax.planning.accounting import Account, account

_MOST_NAMES = 20


@dataclass(frozen=True)
class Inspect:
    """Count layers, parameters and bytes from a configuration; compare a checkpoint or its index with it.

    Exit code 1 where the checkpoint or the index is not what the configuration asks for.
    """

    source: tyro.conf.Positional[str]
    """A checkpoint directory, a config.json, or a shipped name such as kimi-k3."""
    index: Path | None = None
    """A model.safetensors.index.json (or .gz) whose names are compared with the configuration."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        """Prints the account and what was compared."""
        try:
            path = find_config(self.source)
        except ConfigError as error:
            raise UsageError(str(error)) from None
        config = ModelConfig.from_file(path)
        checkpoint, fault = None, None
        if is_converted(Path(self.source)):
            try:
                converted = ConvertedSource(Path(self.source))
                config, checkpoint = converted.config, _count_converted(converted)
            except CheckpointError as error:
                fault = str(error)
        elif Path(self.source).is_dir():
            try:
                files = CheckpointFiles(Path(self.source))
                config = resolve_indexer(config, {name: t.shape for name, t in files.tensors.items()})
                checkpoint = _compare_files(config, files)
                check_tensors(config, files.tensors)
            except CheckpointError as error:
                fault = str(error)
        names, total = ({}, None) if self.index is None else _read_index(self.index)
        if any(name.endswith(".indexer.k_norm.bias") for name in names):
            config = config.with_indexer_sizes(0, 0, key_norm_bias=True)
        try:
            counted = account(config)
        except ConfigError as error:
            raise CommandError(f"{fault or error}") from None
        index = None
        if self.index is not None:
            sizes = {"names": len(names), "total_size": total, "expected_size": counted.checkpoint_bytes}
            index = {**sizes, **_report(compare_names(config, names))}
        if self.json:
            print(json.dumps(_as_json(config, counted, checkpoint, fault, index), indent=2))
        else:
            _print(console(), config, counted, checkpoint, index)
        if fault is not None:
            raise CommandError(fault)
        for where, found in ((self.source, checkpoint), (self.index, index)):
            if found is not None and (found["missing"] or found["extra"]):
                raise CommandError(f"{where}: {len(found['missing'])} names missing, {len(found['extra'])} extra")


def _compare_files(config: ModelConfig, files: CheckpointFiles) -> dict[str, Any]:
    sizes = [tensor.end - tensor.start for tensor in files.tensors.values()]
    return {"files": len(files.files), "bytes": sum(sizes), **_report(compare_names(config, files.tensors))}


def _count_converted(source: ConvertedSource) -> dict[str, Any]:
    arrays = [array for record in source.records.values() for array in record.values()]
    sizes = {"parts": len(source.records), "arrays": len(arrays), "bytes": sum(array.nbytes for array in arrays)}
    return {**sizes, "missing": [], "extra": []}


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise CommandError(f"{path} cannot be read: {error}") from None
    return read_index(str(path), data)


def _report(report: NameReport) -> dict[str, Any]:
    return {"matched": report.matched, "missing": list(report.missing), "extra": list(report.extra)}


def _as_json(
    config: ModelConfig,
    counted: Account,
    checkpoint: dict[str, Any] | None,
    fault: str | None,
    index: dict[str, Any] | None,
) -> dict[str, Any]:
    totals = {"text_parameters": counted.text_parameters, "checkpoint_bytes": counted.checkpoint_bytes}
    return {
        "architecture": config.architecture,
        "num_layers": config.num_layers,
        **asdict(counted),
        **totals,
        "checkpoint": checkpoint,
        "fault": fault,
        "index": index,
    }


def _print(
    out: Console,
    config: ModelConfig,
    counted: Account,
    checkpoint: dict[str, Any] | None,
    index: dict[str, Any] | None,
) -> None:
    print_table(
        out, f"{config.architecture}: {config.num_layers} layers", ("kind", "layers"), [*counted.layers.items()]
    )
    parameters = [*counted.parameters.items(), ("text", counted.text_parameters)]
    if counted.vision_parameters:
        both = counted.text_parameters + counted.vision_parameters
        parameters += [("vision tower and projector", counted.vision_parameters), ("text and vision", both)]
    parameters.append(("active a token", counted.active_parameters))
    print_table(out, "Parameters", ("component", "numbers"), parameters)
    sizes = [(component, dtype, size) for component, by in counted.bytes.items() for dtype, size in by.items()]
    sizes.append(("checkpoint", "", counted.checkpoint_bytes))
    print_table(out, "Checkpoint bytes", ("component", "dtype", "bytes"), sizes)
    memory = [
        ("cache, a token (bfloat16)", counted.cache_bytes_per_token),
        ("KDA states, a sequence (float32)", counted.state_bytes),
        ("convolution inputs, a sequence (bfloat16)", counted.conv_bytes),
    ]
    print_table(out, "Memory of a conversation", ("what", "bytes"), memory)
    for title, found in (("Checkpoint directory", checkpoint), ("Index", index)):
        if found is not None:
            rows = [(key, value) for key, value in found.items() if isinstance(value, int)]
            rows += [(key, len(found[key])) for key in ("missing", "extra")]
            print_table(out, title, ("what", "count"), rows)
            for key in ("missing", "extra"):
                for name in found[key][:_MOST_NAMES]:
                    out.print(f"{key}: {name}", soft_wrap=True, markup=False)
