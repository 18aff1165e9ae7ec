"""Where compiled functions are kept between runs."""

import os
from pathlib import Path

import jax


def use_compilation_cache() -> None:
    """Keeps compiled functions in `~/.cache/kimi-jax/compiled` (below `XDG_CACHE_HOME`, where that is set).

    JAX's own `JAX_COMPILATION_CACHE_DIR` names another directory, or none where it is empty. In a job process 0 writes:
    the hosts should share the directory.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or compilation_cache() is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        directory = (Path(home) if home else Path.home() / ".cache") / "kimi-jax" / "compiled"
    except RuntimeError:  # a user without a home
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))


def compilation_cache() -> str | None:
    """The directory in use."""
    directory: str | None = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009 (jax.config is untyped)
    return directory
