"""The arithmetic that must come out, to the byte (section 4 of the model's description)."""

import dataclasses
import json

import pytest

from kimi_jax.config import ModelConfig
from kimi_jax.planning.accounting import account


@pytest.fixture(scope="module")
def k3():
    return account(ModelConfig.from_file("kimi-k3"))


def test_parameters_of_k3(k3):
    assert k3.text_parameters == 2_779_484_476_000
    assert k3.vision_parameters == 401_214_464 + 46_144_512
    assert k3.text_parameters + k3.vision_parameters == 2_779_931_834_976
    assert k3.active_parameters == 104_189_612_640


def test_bytes_of_k3(k3):
    assert k3.checkpoint_bytes == 1_560_860_324_864
    experts = k3.bytes["routed experts"]
    assert experts == {"uint8": 1_446_456_066_048}
    assert k3.checkpoint_bytes - experts["uint8"] == 114_404_258_816


def test_memory_of_a_conversation_with_k3(k3):
    assert k3.cache_bytes_per_token == 27_648
    assert k3.state_bytes == 434_110_464
    assert k3.conv_bytes == 15_261_696


def test_layers_of_k3(k3):
    assert k3.layers == {"KDA attention": 69, "MLA attention": 24, "mixture of experts": 92, "dense MLP": 1}


def test_indexer_of_k31(k3):
    k31 = account(ModelConfig.from_file("kimi-k3.1-pro"))
    assert k31.cache_bytes_per_token - k3.cache_bytes_per_token == 6_144
    a_layer = 32 * 128 * 1536 + 128 * 7168 + 32 * 7168 + 128
    assert k31.text_parameters - k3.text_parameters == k31.parameters["indexer"] == 24 * a_layer
    assert k31.layers["with indexer"] == 24
    assert (k31.state_bytes, k31.conv_bytes) == (k3.state_bytes, k3.conv_bytes)


def test_a_tied_head_is_counted_once():
    config = ModelConfig.from_file("tiny-k3")
    untied, tied = account(config), account(dataclasses.replace(config, tie_embeddings=True))
    assert untied.text_parameters - tied.text_parameters == 512 * 128
    assert untied.active_parameters == tied.active_parameters


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear", "tiny-k31"])
def test_bytes_of_the_tiny_checkpoints(name, tiny):
    index = json.loads((tiny.directory(name) / "model.safetensors.index.json").read_text())
    # The loaded model's configuration knows what only the files tell: tiny-k31's key norm has a bias.
    assert account(tiny(name).config).checkpoint_bytes == index["metadata"]["total_size"]
