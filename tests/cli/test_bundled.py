from pathlib import Path

import pytest

import kimi_jax as kj
from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.cli.bundled import DEMO, find_checkpoint, find_source
from kimi_jax.cli.main import main
from kimi_jax.cli.output import UsageError
from kimi_jax.model.model import flatten


def test_demo_model_is_small_and_in_the_published_layout():
    assert find_checkpoint(Path("demo-k3")) == DEMO
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 4_000_000
    model = kj.load_model(DEMO)
    leaves = dict(flatten(model.params))
    packed = sum(2 * leaf.size for name, leaf in leaves.items() if name.endswith("weight_packed"))
    assert 2_000_000 <= packed + sum(leaf.size for leaf in leaves.values() if leaf.dtype != "uint8") <= 6_000_000
    assert leaves["layers.1.block_sparse_moe.experts.w2.weight_packed"].shape == (24, 64, 64)
    assert leaves["layers.0.self_attn.q_proj.weight"].dtype == "bfloat16"
    assert model.config.layer_kinds == ("kda", "kda", "kda", "mla")


def test_demo_model_has_its_vocabulary():
    config = kj.ModelConfig.from_file(DEMO)
    tokenizer = Tokenizer.from_directory(DEMO, expected_vocab_size=config.vocab_size)
    assert (config.bos_id, config.pad_id) == (tokenizer.bos_id, tokenizer.pad_id)
    assert config.stop_ids == (tokenizer.eos_id, tokenizer.end_of_msg_id)
    ids = tokenizer.encode("And God said, Let there be light")
    assert tokenizer.decode(ids) == "And God said, Let there be light"
    assert len(ids) < 12


def test_a_directory_called_like_a_bundled_checkpoint_is_meant_first(tmp_path, monkeypatch):
    assert find_source("demo-k3") == str(DEMO)
    assert find_source("gs://somewhere/demo-k3") == "gs://somewhere/demo-k3"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-k3").mkdir()
    assert find_source("demo-k3") == "demo-k3"
    assert find_checkpoint(Path("demo-k3")) == Path("demo-k3")


def test_other_names_are_refused():
    with pytest.raises(UsageError, match="the bundled checkpoints are tiny-k3 and demo-k3"):
        find_checkpoint(Path("demo"))


def test_train_names_settings_that_are_missing(tmp_path, capsys):
    assert main(["train", "--config", str(tmp_path / "none.toml"), "--out", str(tmp_path / "run")]) == 1
    assert "none.toml: there is no such file" in capsys.readouterr().err
