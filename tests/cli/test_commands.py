"""The commands: what they print, and their exit codes."""

import base64
import gzip
import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("generate")  # compiled functions are shared with the tests of generation
ROOT = Path(__file__).parents[2]
INDEX = ROOT.parent / "shared" / "k3" / "model.safetensors.index.json.gz"


def test_inspect_prints_every_number_whole(run):
    code, out, _ = run("inspect", "kimi-k3")
    assert code == 0
    for number in (
        "2,779,484,476,000",
        "2,779,931,834,976",
        "104,189,612,640",
        "1,560,860,324,864",
        "1,446,456,066,048",
        "27,648",
        "434,110,464",
        "15,261,696",
    ):
        assert re.search(rf"(^|\s){number}(\s|$)", out), number


def test_inspect_as_json(run):
    code, out, _ = run("inspect", "kimi-k3.1-pro", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["cache_bytes_per_token"] == 33_792
    assert report["layers"]["with indexer"] == 24


@pytest.mark.skipif(not INDEX.is_file(), reason="the real weight index (../shared/k3) is not here")
def test_inspect_accounts_for_every_name_of_the_real_index(run):
    code, out, _ = run("inspect", "kimi-k3", "--index", INDEX, "--json")
    index = json.loads(out)["index"]
    assert code == 0
    assert (index["names"], index["matched"], index["missing"], index["extra"]) == (497_220, 497_220, [], [])
    assert index["total_size"] == index["expected_size"] == 1_560_860_324_864


def test_inspect_says_what_only_a_checkpoint_could_tell(run, tiny, tmp_path):
    raw = json.loads((tiny.directory("tiny-k31") / "config.json").read_text())
    del raw["text_config"]["dsa_config"]["index_n_heads"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    code, _, error = run("inspect", tmp_path / "config.json")
    assert code == 1
    assert "'dsa_config'" in error
    assert "'index_n_heads'" in error


def test_inspect_names_what_an_index_lacks_and_has_too_much(run, tiny, tmp_path):
    index = json.loads((tiny.directory("tiny-k3") / "model.safetensors.index.json").read_text())
    file = index["weight_map"].pop("language_model.model.norm.weight")
    index["weight_map"]["language_model.model.nurm.weight"] = file
    path = tmp_path / "index.json.gz"
    path.write_bytes(gzip.compress(json.dumps(index).encode()))
    code, out, error = run("inspect", "tiny-k3", "--index", path)
    assert code == 1
    assert "missing: language_model.model.norm.weight" in out
    assert "extra: language_model.model.nurm.weight" in out
    assert "1 names missing, 1 extra" in error


def test_inspect_compares_a_directory(run, tiny, checkpoint):
    code, out, _ = run("inspect", tiny.directory("tiny-k31"), "--json")
    found = json.loads(out)["checkpoint"]
    assert code == 0
    assert (found["files"], found["missing"], found["extra"]) == (2, [], [])
    damaged = checkpoint("tiny-k31")
    (damaged / "model-00002-of-000002.safetensors").unlink()
    code, out, error = run("inspect", damaged)
    assert code == 1
    assert "text" in out
    assert "1 of 2 files are missing" in error


def test_generate_ids(run, tiny, golden):
    data = golden("tiny-k31")
    prompt = data["greedy_prompt_ids"].tolist()
    options = ("--dtype", "float32", "--max-new-tokens", "8")
    code, out, error = run("generate", tiny.directory("tiny-k31"), *options, "--prompt-ids", *prompt)
    assert code == 0
    assert [int(token) for token in out.split()] == data["greedy_new_ids"][:8].tolist()
    assert re.search(r"8 tokens \(length\), [\d.]+ tokens/s", error)
    code, out, _ = run("generate", tiny.directory("tiny-k31"), *options, "--json", "--prompt-ids", *prompt)
    report = json.loads(out)
    assert report["ids"] == data["greedy_new_ids"][:8].tolist()
    assert report["finish_reason"] == "length"
    assert len(report["logprobs"]) == 8


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "give the prompt once"),
        (("--prompt", "a", "--prompt-ids", "1"), 2, "give the prompt once"),
        (("--prompt", "a"), 2, r"--prompt needs .*tiktoken.model"),
        (("--prompt-ids", "1", "--mesh", "data"), 2, "cannot read mesh 'data'"),
        (("--prompt-ids", "1", "--mesh", "rows=2"), 2, "unknown mesh axis 'rows'"),
        (("--prompt-ids", "1", "--mesh", "tensor=3"), 1, "3 does not divide"),
        (("--prompt-ids", "1", "--temperature", "-1"), 2, "temperature must be at least 0"),
        (("--prompt-ids", "600"), 2, "token id 600 is outside the vocabulary"),
        (("--prompt-ids", "1", "--max-new-tokens", "5000"), 2, "the model's context is 4096"),
        (("--prompt-ids", "one"), 2, "one"),
        (("--prompt-ids", "1", "--stop-ids", "600"), 2, "token id 600 is outside the vocabulary"),
    ],
)
def test_generate_refuses(run, tiny, options, code, message):
    found, _, error = run("generate", tiny.directory("tiny-k31"), *options)
    assert found == code
    assert re.search(message, error)


def test_a_directory_that_is_none(run, tmp_path):
    code, _, error = run("generate", tmp_path / "nowhere", "--prompt-ids", "1")
    assert code == 2
    assert "nowhere is not a directory" in error


def test_a_tokenizer_of_another_vocabulary_is_refused(run, checkpoint):
    directory = checkpoint("tiny-k31")
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(255)]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines))
    code, _, error = run("generate", directory, "--prompt", "a")
    assert code == 1
    assert "tiktoken.model" in error


def test_wrong_use(run):
    assert run("demo", "--max-new-tokens", "300")[0] == 2
    assert run("inspect", "no-such-model")[0] == 2
    assert run("no-such-command")[0] == 2
    assert run("inspect")[0] == 2


@pytest.mark.parametrize(
    "arguments", [(), ("--help",), ("inspect", "--help"), ("generate", "--help"), ("demo", "--help")]
)
def test_help(run, arguments):
    code, out, _ = run(*arguments)
    assert code == 0
    assert "usage: kimi-jax" in out


def test_demo(run):
    code, out, _ = run("demo", "--max-new-tokens", "30")
    assert code == 0
    assert re.search(r"experts\.w1\.weight_packed +\[24, 128, 32\] +uint8 +data×tensor, –, – +\[3, 128, 32\]", out)
    assert re.search(r"And it came to pass(\W+\w+){10}", out)
    assert re.search(r"decode [\d,]+ tokens/s", out)
