"""The tiny checkpoint that comes with the package, and finding a checkpoint by path or name."""

from pathlib import Path

from kimi_jax.cli.output import UsageError

BUNDLED = Path(__file__).parents[1] / "data" / "tiny-k3"
"""Directory of a 9-layer K3 with random weights in the real layout, and the published code's continuation."""


def find_checkpoint(source: Path) -> Path:
    """The checkpoint directory at `source`, or the bundled one for its name."""
    if source.is_dir():
        return source
    if str(source) == BUNDLED.name:
        return BUNDLED
    raise UsageError(f"{source} is not a directory; the bundled checkpoint is {BUNDLED.name}")
