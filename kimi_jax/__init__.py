"""Kimi K3, K3.1 Pro and Kimi-Linear in JAX.

```python
import kimi_jax as kj

mesh = kj.make_mesh({"data": 2, "tensor": 4})
model = kj.load_model("path/to/checkpoint", mesh=mesh)
out = kj.generate(model, [[1, 2, 3]], max_new_tokens=16)
```

`model.params` is a nested dict of arrays with the checkpoint's names; `model.layers[3]` looks into the module tree.
Lower down: `kimi_jax.ops` (the arithmetic), `kimi_jax.model` (the modules), `kimi_jax.parallel` (the sharding table).
"""

from kimi_jax.checkpoint.load import load_model
from kimi_jax.config import ModelConfig
from kimi_jax.inference.caches import copy_cache, init_cache, load_cache, reset_rows, save_cache
from kimi_jax.inference.functions import decode, forward, prefill, score, trace
from kimi_jax.inference.generate import generate
from kimi_jax.inference.sampling import Sampling
from kimi_jax.model.cache import Cache
from kimi_jax.model.model import Model
from kimi_jax.parallel.mesh import make_mesh
from kimi_jax.version import __version__

__all__ = [
    "Cache",
    "Model",
    "ModelConfig",
    "Sampling",
    "__version__",
    "copy_cache",
    "decode",
    "forward",
    "generate",
    "init_cache",
    "load_cache",
    "load_model",
    "make_mesh",
    "prefill",
    "reset_rows",
    "save_cache",
    "score",
    "trace",
]
