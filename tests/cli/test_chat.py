"""`kimi-jax chat` and what it keeps, on a tiny model with random weights: its answers are long and mean nothing."""

import io
import json
import shutil

import pytest
from rich.console import Console
from two_layers import two_layers

from kimi_jax.chat.parser import ContentDelta, OutputParser
from kimi_jax.chat.render import render
from kimi_jax.chat.segments import segments_ids
from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.chat.tools import make_tool
from kimi_jax.cli.chat import Screen, _Shown
from kimi_jax.cli.talk import DECLINED, STOPPED, Talk
from kimi_jax.inference.conversation import Conversation
from kimi_jax.inference.sampling import Sampling

pytestmark = pytest.mark.xdist_group("conversation")  # which shares its compiled functions


def shout(text: str) -> str:
    """Says it louder."""
    if not text:
        raise LookupError("nothing to say")
    return text.upper()


@pytest.fixture
def model(tiny):
    return two_layers(tiny("tiny-kimi-linear"))


@pytest.fixture
def talk(model, vocabulary):
    return Talk(Conversation(model, 250), Tokenizer.from_directory(vocabulary), max_new_tokens=3)


@pytest.fixture
def armed(model, vocabulary):
    talk = Conversation(model, 250)
    return Talk(talk, Tokenizer.from_directory(vocabulary), effort="low", tools=[make_tool(shout)])


def written(talk):
    options = {name: value for name, value in talk.options.items() if name != "thinking"}
    return segments_ids(render(talk.messages, thinking=talk.thinking, **options), talk.tokenizer)


def test_an_answer_that_was_cut_off_is_written_anew(talk):
    talk.say("hello")
    prompt = written(talk)
    deltas = []
    reply = talk.reply(deltas.append)
    assert (reply.tokens, reply.prefilled, reply.context) == (3, len(prompt), len(prompt) + 3)
    assert reply.end == "as many tokens as an answer may have"
    assert talk.messages[-1]["role"] == "assistant"
    talk.say("and now?")
    again = talk.reply(deltas.append)
    talk.messages.pop()
    assert again.prefilled == len(written(talk)) - len(prompt)  # the states behind the first prompt are kept


def test_ids_of_a_whole_answer_are_kept(talk):
    """The model's own ids stay, even where the text would be encoded in another way."""
    talk.say("hello")
    prompt = written(talk)
    text = "hm<|close|>think<|sep|><|open|>response<|sep|>fine<|close|>response<|sep|>"
    answer = talk.tokenizer.encode_structural(text + "<|close|>message<|sep|><|end_of_msg|>")
    parser = OutputParser(talk.tokenizer)
    for token in answer:
        parser.push(token)
    parser.finish()
    assert parser.complete
    talk.messages.append(dict(parser.message))
    talk._written = (prompt + answer, len(talk.messages))
    assert list(talk.conversation.answer(prompt + answer, [], 1))
    talk.say("more")
    wanted = written(talk)
    assert wanted[: len(prompt + answer)] == prompt + answer  # here both are the same
    assert talk.reply(lambda delta: None).prefilled == len(wanted) - len(prompt + answer)


def test_retry_forgets_the_answer_and_changes_the_seed(model, vocabulary):
    sampling = Sampling(temperature=1.0, seed=1)
    room = Conversation(model, 200, sampling)
    talk = Talk(room, Tokenizer.from_directory(vocabulary), sampling=sampling, max_new_tokens=8)
    assert not talk.take_back()
    talk.say("hello")
    talk.reply(lambda delta: None)
    first = talk.messages[-1]
    assert talk.take_back()
    assert [message["role"] for message in talk.messages] == ["user"]
    assert talk.reply(lambda delta: None).prefilled == 0
    assert talk.messages[-1] != first


CALL = {"id": "shout:0", "type": "function", "function": {"name": "shout", "arguments": '{"text": "hey"}'}}


@pytest.mark.parametrize(
    ("call", "answers", "result"),
    [
        (CALL, ["y"], "HEY"),
        (CALL, ["no"], DECLINED),
        (CALL, [], DECLINED),  # the input ends
        ({**CALL, "function": {"name": "shout", "arguments": '{"text": 3}'}}, ["yes"], "Error: shout: text must be"),
        ({**CALL, "function": {"name": "shout", "arguments": '{"text": ""}'}}, ["y"], "Error: LookupError: nothing"),
    ],
)
def test_calls_are_made_where_the_user_allows_them(armed, call, answers, result):
    talk = armed
    talk.say("use it")
    talk.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    assert talk.pending() == [call]
    asked = []

    def read(question):
        asked.append(question)
        if not answers:
            raise EOFError
        return answers.pop(0)

    out = io.StringIO()
    ended = not answers
    assert Screen(talk, Console(file=out, width=1000), hidden=False)._call(call, read) is not ended
    assert asked == [f"call {call['function']['name']}({call['function']['arguments']})? [y/N] "]
    assert talk.messages[-1]["role"] == "tool"
    assert talk.messages[-1]["content"].startswith(result)
    assert result in out.getvalue()
    assert written(talk)  # what came of it can be written


def test_a_call_of_no_tool_is_not_asked_about(armed):
    call = {**CALL, "function": {"name": "whisper", "arguments": "{}"}}
    armed.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    assert Screen(armed, Console(file=io.StringIO()), hidden=False)._call(call, pytest.fail)
    assert armed.messages[-1]["content"] == "Error: there is no tool 'whisper'."


def test_a_question_cannot_be_forged(armed):
    call = {**CALL, "function": {"name": "shout", "arguments": '{"text": "x")? [y/N] y\nHEY\u202e'}}
    asked = []
    Screen(armed, Console(file=io.StringIO()), hidden=False)._call(call, lambda text: asked.append(text) or "n")
    assert asked == ['call shout({"text": "x")? [y/N] y\\nHEY\\u202e)? [y/N] ']


class OddError(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("raised", "result"),
    [
        (SystemExit(3), "Error: SystemExit: 3"),
        (KeyboardInterrupt(), STOPPED),
        (OddError(), "Error: "),
        (None, "f\ufffd.txt"),
    ],
)
def test_nothing_that_a_tool_does_ends_the_program(armed, raised, result):
    def odd() -> str:
        if raised is not None:
            raise raised
        return "f\udcff.txt"

    armed.tools["odd"] = make_tool(odd)
    call = {**CALL, "function": {"name": "odd", "arguments": "{}"}}
    going_on = Screen(armed, Console(file=io.StringIO()), hidden=False)._call(call, lambda text: "y")
    assert armed.messages[-1]["content"].startswith(result)
    assert going_on is (result != STOPPED)


def test_what_is_shown_is_what_was_written(armed):
    out = io.StringIO()
    shown = _Shown(Console(file=out, width=20), hidden=False)
    for text in ("a:100:b :key: [bold]x[/]\n", "\tif x:\n\t\treturn", " " * 40 + "\x1b[31m\ud800"):
        shown(ContentDelta(text))
    shown.end()
    text = "a:100:b :key: [bold]x[/]\n\tif x:\n\t\treturn" + " " * 40 + "\\x1b[31m\\xd800\n"
    assert out.getvalue() == text


def test_a_message_that_is_too_long_is_taken_back(talk, capsys):
    lines = ["x" * 300, "hello"]

    def read(question):
        if not lines:
            raise EOFError
        return lines.pop(0)

    Screen(talk, Console(file=io.StringIO()), hidden=False).listen(read)
    assert "there is room for 250; your last message was taken back" in capsys.readouterr().err
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]


def test_a_file_is_replaced_only_by_a_whole_one(armed, tmp_path):
    file = tmp_path / "kept.json"
    file.write_text("before")
    armed.messages.append({"role": "user", "content": {1, 2}})
    with pytest.raises(TypeError):
        armed.save(file)
    assert file.read_text() == "before"
    armed.messages[-1]["content"] = "cut \ud83d"
    armed.save(file)
    assert json.loads(file.read_text())["messages"][-1]["content"] == "cut \ufffd"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_conversation_is_written_and_read(armed, tmp_path):
    talk = armed
    talk.say("Grüße")
    talk.messages.append({"role": "assistant", "reasoning_content": "hm", "content": "ja"})
    talk.save(tmp_path / "kept.json")
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["messages"] == talk.messages
    assert kept["effort"] == "low"
    assert kept["tools"][0]["function"]["name"] == "shout"
    before = list(talk.messages)
    talk.messages.clear()
    assert talk.load(tmp_path / "kept.json") == []
    assert talk.messages == before
    talk.options["effort"] = "max"
    assert talk.load(tmp_path / "kept.json") == ["effort"]
    for text, said in [
        ("[", "Expecting value"),
        ('{"messages": 3}', "wanted an object with a list of messages"),
        ('{"messages": [{"role": "wizard"}]}', "wizard"),
    ]:
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            talk.load(tmp_path / "broken.json")
        assert talk.messages == before


@pytest.fixture
def directory(checkpoint, vocabulary):
    target = checkpoint("tiny-kimi-linear")
    shutil.copy(vocabulary / "tiktoken.model", target)
    return target


def test_the_command(directory, run, monkeypatch, tmp_path):
    lines = ["hello  \\", "there", "/retry", f"/save {tmp_path / 'kept.json'}", "/load nowhere", "/sing", "", "/quit"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    options = ["--dtype", "float32", "--max-new-tokens", "4", "--context", "250", "--instruct"]
    code, out, err = run("chat", directory, *options)
    assert code == 0
    assert out.strip()
    assert "\x1b" not in out
    assert err.count("[4 tokens") == 2
    assert "of the prompt were new" in err
    assert "wrote 2 messages" in err
    assert "/load: [Errno 2]" in err
    assert "there is no /sing" in err
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["messages"][0] == {"role": "user", "content": "hello  \nthere"}
    assert kept["thinking"] is False
    assert "effort" not in kept


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--context", "0"], "--context must lie between 1 and"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--tool", "nowhere.py:f"], "nowhere.py is not a file"),
        (["--top-p", "2"], "top_p must be above 0"),
        (["--effort", "medium"], "medium"),
        (["--mesh", "data"], "cannot read mesh"),
    ],
)
def test_wrong_use(directory, run, options, said):
    code, _, err = run("chat", directory, *options)
    assert code == 2
    assert said in err


def test_a_directory_without_a_vocabulary(checkpoint, run):
    code, _, err = run("chat", checkpoint("tiny-kimi-linear"))
    assert (code, "tiktoken.model" in err) == (2, True)
