"""Fine-tuning with low-rank adapters, and training small models whole.

```python
import optax
from kimi_jax.finetune import Batches, Documents, LoRAConfig, Trainer

batches = Batches(Documents(["train.jsonl"], tokenizer), rows=8, length=1024)
trainer = Trainer(model, LoRAConfig(rank=8), optax.adamw(1e-3))
for batch in batches:
    metrics = trainer.step(batch)
```
"""

from kimi_jax.finetune.data.batches import Batch, Batches
from kimi_jax.finetune.data.documents import Documents
from kimi_jax.finetune.optimizer import OptimizerConfig, make_optimizer
from kimi_jax.finetune.targets import LoRAConfig, adapter_spec
from kimi_jax.finetune.trainer import Trainer

__all__ = [
    "Batch",
    "Batches",
    "Documents",
    "LoRAConfig",
    "OptimizerConfig",
    "Trainer",
    "adapter_spec",
    "make_optimizer",
]
