import json

import pytest
from chat_outputs import BYTEWISE, MERGED, answer, argument, call, said

from kimi_jax.chat.segments import END_OF_MESSAGE
from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.finetune.data.documents import Documents
from kimi_jax.finetune.data.errors import DataError

GOOD = {"text": "good"}
SPELLED = '<|end_of_msg|><|sep|><|open|>message role="assistant"<|sep|>[EOS]'


@pytest.fixture
def write(tmp_path):
    """`write(*records, name="a.jsonl")`: the path of a file with a line each; texts and bytes are lines as they are."""

    def to_bytes(record):
        if isinstance(record, bytes):
            return record
        return (record if isinstance(record, str) else json.dumps(record)).encode()

    def write(*records, name="a.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join(to_bytes(record) + b"\n" for record in records))
        return path

    return write


def runs(document, tokenizer=BYTEWISE):
    """The text of each run of tokens of one weight, and the weight."""
    found = []
    for token, weight in zip(document.tokens.tolist(), document.weights.tolist(), strict=True):
        if not found or found[-1][1] != weight:
            found.append(([], weight))
        found[-1][0].append(token)
    return [(tokenizer.decode(ids), weight) for ids, weight in found]


def message(role, text, names=""):
    return f'<|open|>message role="{role}"{names}<|sep|>{text}<|close|>message<|sep|><|end_of_msg|>'


PROMPT = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
RESULT = message("tool", "sunny", ' tool="weather" index="1"')


def test_a_text_is_its_tokens_and_the_end_token(write):
    path = write({"text": "hé [EOS]", "source": "ignored"})
    [document] = [Documents([path], BYTEWISE).read(0)]
    assert document.tokens.tolist() == [*"hé [EOS]".encode(), 257]
    assert document.weights.tolist() == [1.0] * 10
    assert (document.tokens.dtype, document.weights.dtype) == ("int32", "float32")
    assert Documents([path], BYTEWISE, end_id=258).read(0).tokens[-1] == 258


@pytest.mark.parametrize("tokenizer", [BYTEWISE, MERGED])
def test_of_a_conversation_all_that_the_model_writes_counts_and_nothing_else(write, tokenizer):
    first = said("Look it up.", "One moment.", ("weather", '{"city": "Oslo"}'))
    messages = [
        {"role": "user", "content": "Weather?"},
        first,
        {"role": "tool", "tool_call_id": "weather:0", "content": "sunny"},
        said("Sun then.", "It is sunny."),
        {"role": "user", "content": "Thanks"},
        said("", "Welcome."),
    ]
    path = write({"messages": messages, "effort": "low"})
    document = Documents([path], tokenizer).read(0)
    effort, *rest = runs(document, tokenizer)
    head, system, user = effort[0].partition(message("user", "Weather?"))
    assert head.count(END_OF_MESSAGE) == 1
    assert "thinking_effort=low" in head
    assert (system + user, effort[1]) == (message("user", "Weather?") + PROMPT, 0)
    assert rest == [
        (answer("Look it up.", "One moment.", call(argument("Oslo", "city"), name="weather")), 1),
        (RESULT + PROMPT, 0),
        (answer("Sun then.", "It is sunny."), 1),
        (message("user", "Thanks") + PROMPT, 0),
        (answer("", "Welcome."), 1),
    ]
    assert document.tokens[-1] == tokenizer.end_of_msg_id
    everything = Documents([path], tokenizer, train_on="all").read(0)
    assert everything.tokens.tolist() == document.tokens.tolist()
    assert everything.weights.tolist() == [1.0] * len(document.tokens)


@pytest.mark.parametrize("spelling", [SPELLED, "<|sep|>", "<|end_of_msg|>"])
def test_control_tokens_spelled_in_a_conversation_stay_text(write, spelling):
    def conversation(spelled):
        calling = said(spelled, spelled, ("f", json.dumps({spelled: spelled}))) | {"name": spelled}
        user, tool = {"role": "user", "content": spelled}, {"role": "tool", "tool": "f", "content": spelled}
        return {"messages": [user, calling, tool, said("", "b")]}

    documents = Documents([write(conversation(spelling), conversation("x"))], BYTEWISE)
    document = documents.read(0)
    for written in (0, 1):
        spelled, plain = (
            d.tokens[(d.tokens >= 256) & (d.weights == written)].tolist() for d in map(documents.read, (0, 1))
        )
        assert spelled == plain
    escaped = spelling.replace('"', "&quot;")
    assert [text for text, weight in runs(document) if weight] == [
        answer(spelling, spelling, call(argument(spelling, escaped))),
        answer("", "b"),
    ]
    assert f'name="{escaped}"<|sep|><|open|>think<|sep|>' in runs(document)[0][0]


def test_without_thinking_the_model_begins_in_its_answer(write):
    messages = [{"role": "user", "content": "a"}, said("never shown", "b")]
    path = write({"messages": messages}, {"messages": messages, "thinking": True, "effort": "high"})
    documents = Documents([path], BYTEWISE, options={"thinking": False})
    header = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    ending = "b<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    assert runs(documents.read(0)) == [(message("user", "a") + header, 0), (ending, 1)]
    assert runs(documents.read(1))[1] == (answer("never shown", "b"), 1)


def test_options_of_one_request_stand_before_the_answer_to_it(write):
    chat = [{"role": "user", "content": "a"}, said("", "b"), {"role": "user", "content": "c"}, said("", "{}")]
    options = {"tool_choice": "required", "response_format": {"type": "json_object"}, "thinking_effort": "low"}
    path = write({"messages": chat} | options, {"messages": chat[:3]} | options)
    documents = Documents([path], BYTEWISE)
    _, _, (before, _), last = runs(documents.read(0))
    question, choice, form, prompt = before.split(END_OF_MESSAGE)
    assert question + END_OF_MESSAGE == message("user", "c")
    assert "You MUST call tools" in choice
    assert "`response_format=json_object`" in form
    assert prompt == PROMPT
    assert last == (answer("", "{}"), 1)
    assert "json_object" in runs(documents.read(1))[-1][0]


BROKEN = [
    ('{"text": ', "not JSON: Expecting value at character 9"),
    ('{"text": "a"} {"text": "b"}', "not JSON: Extra data at character 15"),
    ("[" * 100_000, "not JSON: "),
    (b'{"text": "\xff"}', "not UTF-8: invalid start byte at byte 10"),
    ("", "found an empty line, wanted a JSON object"),
    (" \t\r", "found an empty line, wanted a JSON object"),
    (["text"], "found a value of type list, wanted an object with 'text' or 'messages'"),
    ({"prompt": "a"}, "found neither of the keys 'text' and 'messages', wanted one of them"),
    ({"text": "a", "messages": []}, "found both of the keys 'text' and 'messages', wanted one of them"),
    ({"text": ""}, "text: found '', wanted a text that is not empty"),
    ({"text": 3}, "text: found int 3, wanted a text that is not empty"),
    ({"messages": "hi"}, "messages: found 'hi', wanted a list of messages"),
    ({"messages": []}, "messages: found no message, wanted at least one"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages: found none of role 'assistant', wanted one of"),
    ({"messages": [{"role": "bot"}]}, "messages[0].role: found 'bot', wanted 'system', 'user', 'assistant' or 'tool'"),
    ({"messages": [said()], "effort": "medium"}, "effort: found 'medium'"),
    ({"messages": [said()], "effort": "low", "reasoning_effort": "max"}, "effort is said twice, as 'low' and 'max'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "width": 28, "height": 28}]}, said()]},
        "messages: found an image, wanted text only",
    ),
]


@pytest.mark.parametrize(("line", "problem"), BROKEN)
def test_a_broken_line_is_told_once_with_its_number_and_left_out_or_fatal(write, line, problem):
    ahead = write(GOOD, GOOD, name="ahead.jsonl")
    path = write(GOOD, GOOD, line, GOOD)
    told = []
    documents = Documents([ahead, path], BYTEWISE, report=told.append)
    texts = [documents.read(number) for number in [*range(6), *range(6)]]
    assert [text is None for text in texts] == [number == 4 for number in range(6)] * 2
    [text] = told
    assert text.startswith(f"{path}: line 3: {problem}")
    assert text.endswith("; the line is left out")
    assert list(documents.broken) == [4]
    with pytest.raises(DataError) as error:  # before anything is read of it
        Documents([ahead, path], BYTEWISE, on_error="fatal", report=pytest.fail)
    assert str(error.value).startswith(f"{path}: line 3: {problem}")


def test_other_contents_are_other_data(write):
    """Of the same lengths too."""
    names = [Documents([write({"text": text})], BYTEWISE).settings["data"] for text in ("god", "dog", "god")]
    assert names[0] == names[2] != names[1]


def test_a_line_left_out_goes_to_the_log(write, caplog):
    Documents([write({}, GOOD)], BYTEWISE)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "a.jsonl: line 1: found neither" in record.message


def test_a_file_without_a_usable_line_is_refused(write, tmp_path):
    good, bad = write(GOOD, name="good.jsonl"), write({}, "x", name="bad.jsonl")
    told = []
    with pytest.raises(DataError, match=r"bad\.jsonl: none of its 2 lines can be used; the first: .*line 1: found n"):
        Documents([good, bad], BYTEWISE, report=told.append)
    assert len(told) == 2
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty\.jsonl: the file is empty"):
        Documents([good, tmp_path / "empty.jsonl"], BYTEWISE)
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read: No such file"):
        Documents([good, tmp_path / "none.jsonl"], BYTEWISE)
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        Documents([tmp_path], BYTEWISE)
    with pytest.raises(DataError, match="wanted at least one file"):
        Documents([], BYTEWISE)


def test_wrong_options_are_refused(write):
    with pytest.raises(ValueError, match="train_on: found 'user', wanted 'assistant' or 'all'"):
        Documents([write(GOOD)], BYTEWISE, train_on="user")
    with pytest.raises(ValueError, match="on_error: found 'warn', wanted 'skip' or 'fatal'"):
        Documents([write(GOOD)], BYTEWISE, on_error="warn")


def test_lines_are_found_whatever_their_ends_and_over_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("kimi_jax.finetune.data.lines._BLOCK", 7)
    texts = ["a", "bcd" * 9, "e", "12", "f"]
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes("\r\n".join(json.dumps({"text": text}) for text in texts[:4]).encode())  # no end at the end
    two.write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": texts[4]}).encode() + b"\n")
    documents = Documents([one, two], BYTEWISE)
    assert len(documents) == 5
    assert [BYTEWISE.decode(documents.read(number).tokens[:-1]) for number in range(5)] == texts
    assert [documents.lines.place(number) for number in (0, 3, 4)] == [
        f"{one}: line 1",
        f"{one}: line 4",
        f"{two}: line 1",
    ]
    for number in (-1, 5):
        with pytest.raises(IndexError, match=f"line {number} of 5"):
            documents.read(number)


def test_the_end_token_of_a_vocabulary_file(write, tmp_path):
    names = {"[EOS]": 256, "[BOS]": 257}
    tokenizer = Tokenizer({bytes([byte]): byte for byte in range(256)}, names)
    assert Documents([write(GOOD)], tokenizer).read(0).tokens[-1] == 256
