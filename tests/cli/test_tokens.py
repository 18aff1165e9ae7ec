"""`kimi-jax tokens`: counts by hand in a vocabulary where each byte is a token."""

import json

import pytest

from kimi_jax.cli.tokens import read_conversation


@pytest.fixture
def conversation(tmp_path):
    file = tmp_path / "run.json"
    messages = [
        {"role": "user", "content": "x" * 1000},
        {"role": "assistant", "reasoning_content": "y" * 300, "content": "z" * 200},
        {"role": "user", "content": "w" * 100},
    ]
    file.write_text(json.dumps({"messages": messages, "thinking_effort": "high", "model": "kimi-k3"}))
    return file


def test_counts_and_cost(run, conversation, vocabulary):
    code, out, _ = run("tokens", conversation, "--tokenizer", vocabulary, "--json", "--turns", "4")
    assert code == 0
    found = json.loads(out)
    assert [(m["message"], m["role"]) for m in found["messages"][:2]] == [(None, "effort"), (0, "user")]
    assert found["messages"][2]["parts"]["reasoning"] == 300
    first, second = found["calls"]
    assert (first["cached"], first["message"], second["message"]) == (0, 1, None)
    assert second["thinking"] == 300
    assert second["cached"] == first["new"] + 3 + first["output"]
    dollars = [(2 * call["new"] + 0.2 * call["cached"] + 10 * call["output"]) / 1e6 for call in (first, second)]
    assert [first["dollars"], second["dollars"]] == pytest.approx(dollars)
    assert found["total"]["dollars"] == pytest.approx(sum(dollars))
    assert found["total"]["thinking_dollars"] == pytest.approx(300 * 0.2 / 1e6)
    assert found["turns"]["calls"] == 4


def test_tables(run, conversation, vocabulary, monkeypatch):
    monkeypatch.setenv("KIMI_K3_TOKENIZER", str(vocabulary))
    code, out, _ = run("tokens", conversation, "--input-price", "4", "--turns", "10")
    assert code == 0
    assert "1,000" in out
    assert "Prices a million tokens: $4 input, $0.2 cached input, $10 output." in out
    assert "Earlier thinking, sent back: 300 tokens of input over 2 calls, $0.000060 as cached input" in out
    assert "A run of 10 calls like these:" in out


@pytest.mark.parametrize(
    ("text", "options", "code", "said"),
    [
        ("[", [], 1, "not JSON"),
        ("3", [], 1, "wanted a list of messages"),
        ('[{"role": "wizard", "content": ""}]', [], 1, "wizard"),
        ("[" * 100_000, [], 1, "not JSON"),
        ('{"messages": [], "effort": "medium"}', [], 1, "medium"),
        ('{"messages": [], "effort": "low", "reasoning_effort": "high"}', [], 1, "said twice, as 'low' and 'high'"),
        ("\udcff[]", [], 1, "not UTF-8: invalid start byte at byte 0"),
        ("[]", ["--turns", "0"], 2, "--turns must lie between 1 and 100,000"),
        ("[]", ["--turns", "100001"], 2, "--turns must lie between 1 and 100,000"),
        ('[{"role": "user", "content": ""}]', ["--turns", "2"], 1, "no answer to average over"),
        ("[]", ["--output-price", "-1"], 2, "below 0"),
        ("[]", ["--cached-price", "nan"], 2, "a number of dollars"),
        ("[]", ["--input-price", "inf"], 2, "a number of dollars"),
    ],
)
def test_wrong_use(run, tmp_path, vocabulary, text, options, code, said):
    file = tmp_path / "run.json"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    found, _, err = run("tokens", file, "--tokenizer", vocabulary, *options)
    assert (found, said in err) == (code, True), err


@pytest.mark.parametrize(
    "effort",
    [
        '"effort": "low", "reasoning_effort": null',
        '"thinking_effort": null, "effort": "low"',
        '"effort": "low", "thinking_effort": "low"',
    ],
)
def test_effort_by_its_other_names(tmp_path, effort):
    file = tmp_path / "run.json"
    file.write_text('{"messages": [], ' + effort + "}", encoding="utf-8-sig")  # with a byte order mark
    assert read_conversation(file) == ([], {"effort": "low"})


def test_without_a_vocabulary(run, conversation, monkeypatch):
    monkeypatch.delenv("KIMI_K3_TOKENIZER", raising=False)
    code, _, err = run("tokens", conversation)
    assert (code, "--tokenizer" in err) == (2, True)
    monkeypatch.setenv("KIMI_K3_TOKENIZER", "")
    assert run("tokens", conversation)[::2] == (2, err)
    assert run("tokens", conversation.parent / "none.json", "--tokenizer", conversation.parent)[0] == 1
