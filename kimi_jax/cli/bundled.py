"""The checkpoints that come with the package, and finding a checkpoint by path or name."""

from pathlib import Path

from kimi_jax.cli.output import UsageError

DATA = Path(__file__).parents[1] / "data"
BUNDLED = DATA / "tiny-k3"
"""Directory of a 9-layer K3 with random weights in the real layout, and the published code's continuation."""
DEMO = DATA / "kjv-demo"
"""Directory of a 4-layer K3 trained on the King James Bible, with its vocabulary."""
NAMES = {directory.name: directory for directory in (BUNDLED, DEMO)}


def find_checkpoint(source: Path) -> Path:
    """The checkpoint directory at `source`, or the bundled one of that name."""
    if source.is_dir():
        return source
    if str(source) in NAMES:
        return NAMES[str(source)]
    raise UsageError(f"{source} is not a directory; the bundled checkpoints are {' and '.join(NAMES)}")
