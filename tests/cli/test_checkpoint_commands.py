"""Commands that make checkpoints, `kimi-jax synthesize`, `convert` and so on: what they print, and their exit codes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.checkpoint.adapters import half_shapes, write_adapters
from kimi_jax.cli.main import main
from kimi_jax.cli.output import parse_bytes
from kimi_jax.config import ModelConfig
from kimi_jax.model.lora import AdapterSpec

pytestmark = pytest.mark.xdist_group("checkpoint commands")
THREE_LAYERS = Path(__file__).parents[1] / "checkpoint" / "three-layers.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of three layers in three files."""
    out = tmp_path_factory.mktemp("source") / "checkpoint"
    assert main(["synthesize", str(THREE_LAYERS), str(out), "--file-size", "400KB"]) == 0
    return out


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """The converted `source`; not to be changed."""
    out = tmp_path_factory.mktemp("converted") / "checkpoint"
    assert main(["convert", str(source), str(out)]) == 0
    return out


def test_synthesize(run, source, tmp_path):
    out = tmp_path / "out"
    assert run("synthesize", THREE_LAYERS, out, "--file-size", "400KB")[:2] == (0, f"{out}: 3 safetensors files\n")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    code, printed, error = run("synthesize", THREE_LAYERS, out)
    assert (code, printed) == (1, "")
    assert error.endswith(f"kimi-jax: {out} is not empty; choose another directory\n")


def test_synthesize_by_seed(run, source, tmp_path):
    assert run("synthesize", THREE_LAYERS, tmp_path / "out", "--file-size", "400KB", "--seed", "1")[0] == 0
    name = "model-00001-of-000003.safetensors"
    assert (tmp_path / "out" / name).read_bytes() != (source / name).read_bytes()


def test_convert_by_two_processes(run, source, tmp_path):
    out, share = tmp_path / "out", ("--process-count", "2", "--process-index")
    code, printed, error = run("convert", source, out, *share, "0")
    assert (code, printed) == (0, f"{out}: 3 of 5 parts are done; the other processes go on\n")
    assert "WARNING" not in error
    code, printed, error = run("verify", out)
    assert (code, printed) == (1, "")
    assert error.endswith(f"run `kimi-jax convert SOURCE {out}` again to resume it\n")
    code, printed, _ = run("convert", source, out, *share, "1", "--max-memory", "2 MB")
    assert (code, printed) == (0, f"{out}: complete, 5 parts\n")
    assert run("convert", source, out)[:2] == (0, f"{out}: complete, 5 parts\n")


def test_overwrite(run, source, converted, tmp_path):
    out = shutil.copytree(converted, tmp_path / "out")
    run("synthesize", THREE_LAYERS, tmp_path / "other", "--seed", "1")
    assert run("convert", tmp_path / "other", out, "--overwrite")[:2] == (0, f"{out}: complete, 5 parts\n")
    assert run("verify", out, "--against", tmp_path / "other")[0] == 0
    assert run("export", out, tmp_path / "back")[:2] == (0, f"{tmp_path / 'back'}: 1 safetensors files\n")
    names = ["config.json", "model-00001-of-000001.safetensors", "model.safetensors.index.json"]
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == names
    code, _, error = run("verify", out, "--against", source)
    assert code == 1
    assert "its source has" in error


def test_verify(run, source, converted):
    count = 108
    assert run("verify", converted)[:2] == (0, f"{converted}: {count} arrays, all equal to their digests\n")
    told = f"{converted}: {count} arrays, all equal to their source\n"
    assert run("verify", converted, "--against", source)[:2] == (0, told)


def test_export(run, source, converted, tmp_path):
    out = tmp_path / "out"
    assert run("export", converted, out)[:2] == (0, f"{out}: 3 safetensors files\n")
    (out / "config.json").write_text("{}")
    code, printed, error = run("export", converted, out)
    assert (code, printed) == (1, "")
    assert "is not empty; choose another folder, or give overwrite" in error
    assert run("export", converted, out, "--overwrite")[0] == 0
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_inspect_counts_a_converted_checkpoint(run, source, converted):
    code, printed, _ = run("inspect", converted, "--json")
    found = json.loads(printed)["checkpoint"]
    assert code == 0
    assert (found["parts"], found["arrays"], found["missing"], found["extra"]) == (5, 108, [], [])
    total = json.loads((source / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert found["bytes"] == total - 2 * 12 * 4  # A_log of two layers lies there without its padding


def test_quantize(run, tmp_path):
    raw = json.loads(THREE_LAYERS.read_text())
    del raw["text_config"]["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    run("synthesize", tmp_path / "config.json", tmp_path / "float")
    code, printed, _ = run("quantize", tmp_path / "float", tmp_path / "out")
    lines = [line.split() for line in printed.splitlines()]
    assert (code, lines[-1]) == (0, f"{tmp_path / 'out'}: experts of 2 layers in MXFP4".split())
    errors = {layer: float(error) for layer, error in (line for line in lines if line[:1] in (["1"], ["2"]))}
    assert errors.keys() == {"1", "2"}
    assert all(0.09 < error < 0.13 for error in errors.values())  # normal numbers lose about a tenth
    code, printed, error = run("quantize", tmp_path / "out", tmp_path / "again")
    assert (code, printed) == (1, "")
    assert "the experts are MXFP4 already" in error


def test_merge(run, source, converted, tmp_path):
    config = ModelConfig.from_file(source)
    experts = "layers.1.block_sparse_moe.experts.w1"
    spec = AdapterSpec((("lm_head", 2, 1.0), (experts, 2, 1.0)))
    arrays = {name: np.full(shape, 1e-4, np.float32) for name, shape in half_shapes(config, spec).items()}
    adapters, out = tmp_path / "run" / "adapters", tmp_path / "out"
    write_adapters(adapters, config, spec, arrays)
    code, printed, error = run("merge", source, tmp_path / "run", out)
    assert (code, printed) == (1, "")
    assert "ask for it with --experts" in error
    code, printed, error = run("merge", source, tmp_path / "run", out, "--experts")
    assert (code, printed) == (1, "")
    assert "survives rounding in 1 of 1 layers (layer 1: 0.0%); nothing is written" in error
    code, printed, _ = run("merge", source, tmp_path / "run", out, "--experts", "--force")
    lines = printed.splitlines()
    assert (code, lines[-1]) == (0, f"{out}: 2 modules changed")
    assert ["1", "0.0%"] in [line.split() for line in lines]
    code, printed, error = run("merge", converted, adapters, tmp_path / "other")
    assert (code, printed) == (1, "")
    assert "is a converted checkpoint: make Hugging Face's files with kimi-jax export" in error


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--max-memory", "16XB"), 2, "'16XB' is not a number of bytes"),
        (("--max-memory", "1KB"), 1, "max_memory of 1,000 bytes is too little: array"),
        (("--process-index", "3"), 2, "process_index 3 must be from 0 to process_count - 1 = 0"),
        (("--process-count", "2", "--overwrite"), 2, "overwrite is for one process"),
        (("--process-count", "two"), 2, "process-count"),
    ],
)
def test_convert_refuses(options, code, message, run, source, tmp_path):
    found, printed, error = run("convert", source, tmp_path / "out", *options)
    assert (found, printed) == (code, "")
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("convert", "{}/none", "{}/out"), 1, "is not a directory"),
        (("convert", "{}/none"), 2, "Required options"),
        (("verify", "{}/none"), 1, "is no converted checkpoint: it has no manifest.json"),
        (("export", "{}/none", "{}/out"), 1, "is no converted checkpoint: it has no manifest.json"),
        (("synthesize", "kimi-k9", "{}/out"), 2, "kimi-k9"),
        (("quantize", "{}/none", "{}/out"), 1, "is not a directory"),
        (("quantize", "{}/none", "gs://out"), 2, "is a URL"),
        (("merge", "{}/none", "{}/run", "{}/out"), 1, "is not a directory"),
        (("merge", "{}/none", "{}/run", "gs://out"), 2, "is a URL"),
        (("synthesize", "tiny-k3", "{}/out", "--file-size", "much"), 2, "'much' is not a number of bytes"),
    ],
)
def test_wrong_use(arguments, code, message, run, tmp_path):
    found, printed, error = run(*(argument.format(tmp_path) for argument in arguments))
    assert (found, printed) == (code, "")
    assert message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("convert", ("(default: 16GB)", "--process-index", "--process-count", "--coordinator", "(default: None)")),
        ("verify", ("--against", "(default: None)")),
        ("export", ("--overwrite", "(default: False)")),
        ("synthesize", ("--seed", "(default: 0)", "(default: 16.7GB)")),
        ("merge", ("--experts", "--force", "(default: False)")),
    ],
)
def test_help_tells_options_and_defaults(command, words, run):
    code, printed, _ = run(command, "--help")
    assert code == 0
    text = " ".join(printed.replace("│", " ").split())  # lines are wrapped to the terminal
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GB", 16_000_000_000),
        ("500MiB", 524_288_000),
        ("500 MiB", 524_288_000),
        ("1.5gib", 1_610_612_736),
        ("1.5TB", 1_500_000_000_000),
        ("2kb", 2000),
        ("17", 17),
        (" 17 B ", 17),
        ("16.7GB", 16_700_000_000),
    ],
)
def test_bytes_in_words(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "16 G", "1,000", "iB", "5iB", "1 GB 2"])
def test_words_that_are_no_bytes(text):
    with pytest.raises(ValueError, match="is not a number of bytes; write it like 16GB or 500MiB"):
        parse_bytes(text)
