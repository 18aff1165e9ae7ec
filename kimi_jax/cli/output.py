"""What commands print: results to standard output, progress and complaints to standard error."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from kimi_jax.checkpoint.storage import local_destination


class UsageError(Exception):
    """Options that cannot be meant; exit code 2."""


class CommandError(Exception):
    """A command that could not do what it was asked for; exit code 1."""


_process: int | None = None


def only_first_prints(process: int | None) -> None:
    """Says which process of a job this is: all but process 0 print complaints only. None: it is alone."""
    global _process
    _process = process


def prints() -> bool:
    """Whether this process prints progress and results."""
    return not _process


def console() -> Console:
    """Standard output. Where it is no terminal, nothing is ever wrapped, cut or coloured."""
    return Console(width=None if sys.stdout.isatty() else 10_000, highlight=False, quiet=not prints())


def emit(text: str, end: str = "\n") -> None:
    """Prints a result to standard output, at once."""
    if prints():
        sys.stdout.write(text + end)
        sys.stdout.flush()


def remark(text: str) -> None:
    """Prints progress to standard error."""
    if prints():
        print(text, file=sys.stderr)


def complain(message: str, code: int) -> int:
    """Prints an error to standard error and returns the exit code."""
    print(f"kimi-jax: {message}" if _process is None else f"kimi-jax: process {_process}: {message}", file=sys.stderr)
    return code


def print_table(out: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str | int]]) -> None:
    """Prints a table whose numbers are right-aligned, with thousands separated, and never shortened."""
    shown = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int) for row in rows)
        shown.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(escape(cell) if isinstance(cell, str) else f"{cell:,}" for cell in row))
    out.print(Text(title, style="bold"), soft_wrap=True)
    out.print(shown)
    out.print()


def check_destination(out: Path) -> None:
    """**Raises:** `UsageError` where `out` is no place for a checkpoint on a local disk."""
    try:
        local_destination(out)
    except ValueError as error:
        raise UsageError(str(error)) from None


@contextmanager
def byte_progress(task: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error for (bytes done, bytes in all), with rate and time left."""
    with named_byte_progress(task) as tell:
        yield lambda done, total: tell(task, done, total)


@contextmanager
def named_byte_progress(first: str = "reading headers") -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error for (what is going on, bytes done, bytes in all), with rate and time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not prints()) as progress:
        bar = progress.add_task(first, total=None)
        yield lambda what, done, total: progress.update(bar, description=what, completed=done, total=total)


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes from "16GB", "500 MiB" or "1000000". **Raises:** `ValueError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?", text.strip(), re.IGNORECASE)
    if found is None or (found[2] or "B").upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a number of bytes; write it like 16GB or 500MiB")
    return int(float(found[1]) * _UNITS[(found[2] or "B").upper()])
