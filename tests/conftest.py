"""Settings of every test: 8 CPU devices, no implicit promotion, run-time shape checks, shared models.

pytest turns warnings into errors (pyproject.toml).
"""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Nearly all of the time goes into compiling. The same programs in half of that; what is optimized as in use:
# the fixture `optimized`.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# What one process has compiled another takes from here: pytest's workers and what the tests start inherit it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="kimi-jax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # now, for commands under test ask for as many as they need
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

from jaxtyping import install_import_hook

# Where arrays have shapes; elsewhere mypy knows as much.
SHAPED = ("kimi_jax.inference", "kimi_jax.model", "kimi_jax.ops", "kimi_jax.parallel")
install_import_hook(SHAPED, "outermost.check")

from functools import cache
from pathlib import Path

import numpy as np
import pytest

import kimi_jax as kj

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("tiny-k3", "tiny-kimi-linear", "tiny-k31")
MESHES: dict[str, dict[str, int] | None] = {
    "one": None,
    "data8": {"data": 8},
    "tensor4": {"tensor": 4},
    "data2-tensor2": {"data": 2, "tensor": 2},
    "context8": {"context": 8},
    "all2": {"data": 2, "context": 2, "tensor": 2},
}


def checkpoint_directory(name: str) -> Path:
    """Directory of a tiny checkpoint; tiny-k3 is the one bundled with the package."""
    return Path(kj.__file__).parent / "data" / name if name == "tiny-k3" else GOLDEN / name


@cache
def load_tiny(name: str, mesh: str = "one", dtype: str = "float32", loop: bool = False) -> kj.Model:
    """A tiny model, loaded once a run."""
    return kj.load_model(checkpoint_directory(name), mesh=kj.make_mesh(MESHES[mesh]), dtype=dtype, loop=loop)


@cache
def load_golden(name: str) -> dict[str, np.ndarray]:
    """The published code's outputs for a tiny model."""
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="session")
def tiny():
    """`tiny(name, mesh="one", dtype="float32", loop=False)`: a shared tiny model."""
    load_tiny.directory = checkpoint_directory
    return load_tiny


@pytest.fixture(scope="session")
def golden():
    """`golden(name)`: the published code's outputs."""
    return load_golden


@pytest.fixture
def optimized():
    """What is compiled meanwhile is optimized as in use, not as quickly as the other tests want it."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def optax_promotion():
    """optax mixes dtypes and ranks: steps are traced as it wants them."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def checkpoint(tmp_path: Path):
    """`checkpoint(name)`: a private copy of a tiny checkpoint, to be damaged."""

    def copy(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(checkpoint_directory(name), target)
        return target

    return copy
