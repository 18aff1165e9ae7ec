"""Settings files: what is left out has its default, what is wrong is named with file, section and field."""

from pathlib import Path

import pytest

from kimi_jax.config import ConfigError
from kimi_jax.finetune.optimizer import OptimizerConfig, schedule
from kimi_jax.finetune.settings import FinetuneConfig, read_settings
from kimi_jax.finetune.targets import LoRAConfig

RECIPES = sorted((Path(__file__).parents[2] / "configs" / "finetune").glob("*.toml"))


def test_a_file_of_some_fields(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[lora]\nrank = 4\nalpha = 8\ntargets = ["experts"]\n[optimizer]\nbetas = [0.8, 0.9]\n')
    found = read_settings(path, FinetuneConfig)
    assert found.lora == LoRAConfig(rank=4, alpha=8.0, targets=("experts",))
    assert found.optimizer.betas == (0.8, 0.9)
    assert found.run.steps == 1000


def test_lora_toml_says_the_defaults():
    path = next(path for path in RECIPES if path.name == "lora.toml")
    assert read_settings(path, FinetuneConfig) == FinetuneConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[lora]\nrang = 4", r"lora: unknown field 'rang'; there are rank, alpha, targets, dropout"),
        ("[lora]\nrank = 4.5", r"lora: rank: found 4.5, wanted int"),
        ("[lora]\nrank = true", r"lora: rank: found True, wanted int"),
        ("[lora]\nrank = 0", r"toml: lora: rank 0 must be at least 1"),
        ("lora = 3", r"lora: found 3, wanted a section \[lora\]"),
        ('[optimizer]\nname = "sgd"', r"optimizer: name: found 'sgd', wanted one of adamw, muon"),
        ("[optimizer]\nbetas = [0.9]", r"betas: found \[0.9\], wanted a list"),
        ("[run]\nsteps = 0", r"steps 0 must be at least 1"),
        (f"[run]\nseed = {1 << 63}", r"toml: run: seed 9223372036854775808 must be at least 0 and below 2\*\*63"),
        ("[optimizer]\nlearning_rate = nan", r"toml: optimizer: learning_rate nan must be at least 0 and finite"),
        ("[run\n", r"not TOML"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_settings(path, FinetuneConfig)
    assert str(path) in str(error.value)


def test_the_rate_counts_optimizer_steps():
    rate = schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=2, final_share=0.1, accumulate=4), steps=40)
    assert [round(float(rate(step)), 4) for step in (0, 1, 2, 6, 10)] == [0.0, 0.5, 1.0, 0.55, 0.1]


def test_the_last_batches_train_something():
    config = OptimizerConfig(accumulate=3)
    config.check_steps(6)
    with pytest.raises(
        ValueError, match=r"steps 7 must be a multiple of the optimizer's accumulate 3: the last 1 would"
    ):
        config.check_steps(7)
