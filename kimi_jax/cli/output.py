"""What commands print: results to standard output, progress and complaints to standard error."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text


class UsageError(Exception):
    """Options that cannot be meant; exit code 2."""


class CommandError(Exception):
    """A command that could not do what it was asked for; exit code 1."""


def console() -> Console:
    """Standard output. Where it is no terminal, nothing is ever wrapped, cut or coloured."""
    return Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)


def complain(message: str, code: int) -> int:
    """Prints an error to standard error and returns the exit code."""
    print(f"kimi-jax: {message}", file=sys.stderr)
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


@contextmanager
def byte_progress(task: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error for (bytes done, bytes in all), with rate and time left."""
    columns = (
        TextColumn(task),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(task, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
