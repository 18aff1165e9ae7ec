"""Held-out bits per byte of checkpoints, as `kimi-jax train` measures them.

python tests/bench/held_out.py configs/finetune/pretrain-tiny.toml DIRECTORY …
"""

import sys

from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.checkpoint.load import load_model
from kimi_jax.finetune.pretrain import PretrainConfig, bits_per_byte
from kimi_jax.finetune.settings import read_settings
from kimi_jax.finetune.windows import read_text


def main() -> None:
    settings, *directories = sys.argv[1:]
    text = read_settings(settings, PretrainConfig).text
    for directory in directories:
        model = load_model(directory, dtype="float32")
        tokenizer = Tokenizer.from_directory(directory, expected_vocab_size=model.config.vocab_size)
        held_out = read_text(text.held_out, tokenizer)
        bits = bits_per_byte(model.spec, model.params, held_out, text.length, text.rows)
        print(f"{directory}: {bits:.4f} bits a byte, experts {'MXFP4' if model.config.moe.packed else 'not packed'}")


if __name__ == "__main__":
    main()
