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
    named = find_source(str(source))
    if named != str(source):
        return Path(named)
    raise UsageError(f"{source} is not a directory; the bundled checkpoints are {BUNDLED.name} and {DEMO.name}")


def find_source(source: str) -> str:
    """A directory or URL as it is; a bundled checkpoint's name, where no directory is called so, as its directory."""
    names = {bundled.name: str(bundled) for bundled in (BUNDLED, DEMO)}
    return source if Path(source).is_dir() else names.get(source, source)
