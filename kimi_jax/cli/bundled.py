"""The small checkpoints that come with the package, and finding a checkpoint by path or name."""

from pathlib import Path

from kimi_jax.cli.output import UsageError

BUNDLED = Path(__file__).parents[1] / "data" / "tiny-k3"
"""Directory of a 9-layer K3 with random weights in the real layout, and the published code's continuation."""
DEMO = BUNDLED.with_name("demo-k3")
"""Directory of a small K3 that was trained on the King James Bible, with its vocabulary; its README.md says how."""


def find_checkpoint(source: Path) -> Path:
    """The checkpoint directory at `source`, or a bundled one for its name."""
    if source.is_dir():
        return source
    for bundled in (BUNDLED, DEMO):
        if str(source) == bundled.name:
            return bundled
    raise UsageError(f"{source} is not a directory; the bundled checkpoints are {BUNDLED.name} and {DEMO.name}")
