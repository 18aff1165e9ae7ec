"""What PEFT makes of adapters on transformers' own Kimi-Linear: run by `test_peft.py`, perhaps by another Python.

Arguments: the model's directory, tokens as JSON, a folder for adapters that PEFT makes, a file for results, and folders
of adapters to be loaded. The results: logits of the bare model, of PEFT's own adapters, and of each folder.
"""

import json
import sys

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

THEIRS = {
    "r": 3,
    "lora_alpha": 5,
    "use_rslora": True,
    "target_modules": [
        "q_proj",
        "kv_b_proj",
        "f_a_proj",
        "f_b_proj",
        "shared_experts.down_proj",
        "layers.0.mlp.up_proj",
    ],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "rank_pattern": {r"layers\.[35]\.self_attn\.q_proj": 7},
    "alpha_pattern": {r"shared_experts\.down_proj": 2},
}


def main():
    base, tokens, made, results, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    ids = torch.tensor(json.loads(tokens))

    def model():
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    def logits(model):
        with torch.no_grad():
            return model(ids).logits.numpy()

    found = {"base": logits(model())}
    torch.manual_seed(0)
    theirs = get_peft_model(model(), LoraConfig(task_type="CAUSAL_LM", **THEIRS)).eval()
    for name, parameter in theirs.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    found["theirs"] = logits(theirs)
    theirs.save_pretrained(made)
    for folder in folders:
        loaded = PeftModel.from_pretrained(model(), folder).eval()
        found[f"count:{folder}"] = sum(".lora_A." in name for name, _ in loaded.named_parameters())
        found[folder] = logits(loaded)
    np.savez(results, **found)


main()
