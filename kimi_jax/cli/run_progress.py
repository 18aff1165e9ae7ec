"""Progress of a run of training on standard error, and its metrics for TensorBoard."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kimi_jax.cli.output import UsageError, prints

SHOWN = {
    "loss": "loss {:.4f}",
    "held_out_loss": "held out {:.4f}",
    "held_out_bits_per_byte": "held out {:.4f} bits a byte",
    "gradient_norm": "gradient {:.3g}",
    "router_max_load": "fullest expert {:.1f}×",
    "router_drift": "drift {:.2%}",
    "tokens_per_second": "{:,.0f} tokens/s",
}
"""Metrics on the line of progress, and how they are written."""


class RunProgress:
    """A bar that says the last metrics; a line for each evaluation, and where standard error is no terminal for some
    of the steps."""

    def __init__(self, bar: Progress, task: TaskID, steps: int, writer: Any) -> None:
        self.bar, self.task, self.steps, self.writer = bar, task, steps, writer
        self.latest: dict[str, float] = {}

    def tell(self, line: Mapping[str, Any]) -> None:
        """Takes a line of the metrics, or a remark."""
        if "remark" in line:
            self.bar.console.print(line["remark"], highlight=False)
            return
        step = int(line["step"])
        self.latest |= {name: value for name, value in line.items() if name in SHOWN}
        text = ", ".join(form.format(self.latest[name]) for name, form in SHOWN.items() if name in self.latest)
        self.bar.update(self.task, completed=step, metrics=text)
        spaced = not self.bar.console.is_terminal and (step == 1 or step % max(1, self.steps // 50) == 0)
        if any(name.startswith("held_out") for name in line) or spaced:
            self.bar.console.print(f"step {step}: {text}", highlight=False)
        if self.writer is not None:
            for name, value in line.items():
                if name != "step":
                    self.writer.add_scalar(name, value, step)


@contextmanager
def run_progress(steps: int, tensorboard: Path | None) -> Iterator[RunProgress]:
    """The progress of a run of `steps` steps; with `tensorboard` the metrics go to that directory too."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}"),
    )
    writer = _writer(tensorboard) if tensorboard is not None and prints() else None
    console = Console(stderr=True, soft_wrap=True, quiet=not prints())
    try:
        with Progress(*columns, console=console, disable=not (prints() and console.is_terminal)) as bar:
            yield RunProgress(bar, bar.add_task("", total=steps, metrics="compiling"), steps, writer)
    finally:
        if writer is not None:
            writer.close()


def _writer(directory: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise UsageError("--tensorboard needs the package tensorboardX: pip install 'kimi_jax[tensorboard]'") from None
    return SummaryWriter(str(directory))
