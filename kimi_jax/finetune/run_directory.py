"""Directories of runs: made, or found to be of the same run; and their metrics."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from kimi_jax.checkpoint.manifest import write_durably

NAME = "run.json"
FREE = ("run.evaluate_every", "run.save_every", "run.keep", "run.drift_every", "run.log_every")
"""Settings that may change from one start to the next."""


class RunError(Exception):
    """A run directory that cannot be gone on with. Its text says why and what to do."""


def open_run(directory: str | Path, settings: Mapping[str, Any], saved: bool) -> None:
    """Makes a directory for a run, or compares what its run was started with.

    **Arguments:**

    - `settings`: what the run depends on, as JSON has it, in sections. `saved`: whether the directory holds a save;
        before the first one a run may be started with other settings.

    In a job process 0 alone looks and writes.

    **Raises:** `RunError`, in every process, for a directory of another run, or that is no run's.
    """
    fault = ""
    if jax.process_index() == 0:
        try:
            _open(Path(directory), json.loads(json.dumps(settings)), saved)
        except RunError as error:
            fault = str(error)
    if jax.process_count() > 1:
        refused = bool(multihost_utils.broadcast_one_to_all(np.asarray(bool(fault))))
        fault = fault or ("process 0 refused the run's directory" if refused else "")
    if fault:
        raise RunError(fault)


def cut_metrics(path: Path, done: int) -> None:
    """Leaves the lines of the steps up to `done`: those behind it come again."""
    if path.is_file():
        kept = [line for line in path.read_text(errors="replace").splitlines() if _step(line) <= done]
        write_durably(path, "".join(f"{line}\n" for line in kept).encode())


def _step(line: str) -> float:
    """Of a line of metrics; of a damaged one infinity."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _open(directory: Path, wanted: Mapping[str, Any], saved: bool) -> None:
    path = directory / NAME
    if path.is_file() and saved:
        try:
            found = dict(_leaves(json.loads(path.read_text())))
        except ValueError:
            found = {}
        if "" in found or not found:
            raise RunError(f"{path}: not a JSON object; restore the file, or choose another directory")
        new = dict(_leaves(wanted))
        for name in sorted(found.keys() | new.keys()):
            if found.get(name) != new.get(name) and not name.endswith(FREE):
                raise RunError(
                    f"{directory}: the run there was started with {name} {found.get(name)!r}, now it is "
                    f"{new.get(name)!r}; go on with the same, or choose another directory"
                )
    elif directory.exists() and not directory.is_dir():
        raise RunError(f"{directory} is a file; a run wants a directory: choose another name")
    elif not path.is_file() and directory.is_dir() and {x.name for x in directory.iterdir()} - {f".{NAME}.tmp"}:
        raise RunError(f"{directory} is not empty and holds no run (no {NAME}); choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(wanted, indent=1).encode())


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree
