"""Generated outputs for the tests of the chat parser: how they are written, encoded and read."""

import json
import re
from collections import Counter

import pytest

from kimi_jax.chat.parser import CallArguments, CallStart, ContentDelta, OutputParser, ReasoningDelta
from kimi_jax.chat.tokenizer import Tokenizer

THOUGHT = "<|close|>think<|sep|><|open|>response<|sep|>"
ANSWERED = "<|close|>response<|sep|>"
TOOLS = ANSWERED + "<|open|>tools<|sep|>"
CALL = '<|open|>call tool="f"<|sep|>'
V = "<|close|>argument<|sep|>"
END = "<|close|>message<|sep|><|end_of_msg|>"


def opened(value, key="k", type="string"):
    """An argument without its close."""
    return f'<|open|>argument key="{key}" type="{type}"<|sep|>{value}'


def argument(value, key="k", type="string"):
    return opened(value, key, type) + V


def call(*arguments, name="f", index=1):
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>' + "".join(arguments) + "<|close|>call<|sep|>"


def answer(reasoning, content, *calls):
    """A whole output."""
    tools = "<|open|>tools<|sep|>" + "".join(calls) + "<|close|>tools<|sep|>" if calls else ""
    return reasoning + THOUGHT + content + ANSWERED + tools + END


def said(reasoning="", content="", *calls):
    """The message of reasoning, content and calls of (name, JSON text)."""
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(calls)
        ]
    return message


# The format's worked examples, as far as they are generated: the output and what it says.
EXAMPLES = {
    "E3": (
        answer("The user greets me.", "Hello! How can I help?"),
        said("The user greets me.", "Hello! How can I help?"),
    ),
    "E5": (answer("", "pong"), said("", "pong")),
    "E6": (
        answer("I should run ls.", "Listing files.", call(argument("ls -la", "command"), name="bash")),
        said("I should run ls.", "Listing files.", ("bash", '{"command": "ls -la"}')),
    ),
    "E7": (
        answer(
            "",
            "",
            call(
                argument('hi "there" & friends', "text"),
                argument("3", "count", "number"),
                argument("1.5", "ratio", "number"),
                argument("true", "flag", "boolean"),
                argument("null", "nothing", "null"),
                argument('{"k": "v"}', "obj", "object"),
                argument('[1, "two", false]', "arr", "array"),
                name="do",
            ),
        ),
        said(
            "",
            "",
            (
                "do",
                r'{"text": "hi \"there\" & friends", "count": 3, "ratio": 1.5, "flag": true, "nothing": null, '
                r'"obj": {"k": "v"}, "arr": [1, "two", false]}',
            ),
        ),
    ),
    "E7b": (
        answer(
            "",
            "",
            call(
                argument('he said "hi" & left', "s"),
                argument("1e2", "n", "number"),
                argument("[1, 2,  3]", "a", "array"),
                argument('{"b": 2, "a": 1}', "o", "object"),
            ),
        ),
        said("", "", ("f", r'{"s": "he said \"hi\" & left", "n": 1e2, "a": [1, 2,  3], "o": {"b": 2, "a": 1}}')),
    ),
    "E8": (
        answer("", "", call(argument("&lt;&amp;", "k&amp;&quot;y"), name="we&amp;ird&quot;name")),
        said("", "", ('we&ird"name', r'{"k&\"y": "&lt;&amp;"}')),
    ),
    "E10": (
        answer("", "", call(argument("ls", "command"), name="bash"), call(argument("x", "p"), name="grep", index=2)),
        said("", "", ("bash", '{"command": "ls"}'), ("grep", '{"p": "x"}')),
    ),
    "E14": (
        answer("", "", call('<|open|>json type="object"<|sep|>{"command": oops<|close|>json<|sep|>', name="bash")),
        said("", "", ("bash", r'{"json": "{\"command\": oops"}')),
    ),
    "E15": (
        answer(
            "你好 👩‍👩‍👧", "世界 👋", call(argument("é\n世👋", "键"), argument('["世"]', "l", "array"), name="搜索")
        ),
        said("你好 👩‍👩‍👧", "世界 👋", ("搜索", '{"键": "é\\n世👋", "l": ["世"]}')),
    ),
    "no arguments": (
        answer("", "", call(name="now"), call(name="now", index=2), call(index=3)),
        said("", "", ("now", "{}"), ("now", "{}"), ("f", "{}")),
    ),
}

NAMES = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[EOT]", "<|media_pad|>"]
BYTES = [bytes([byte]) for byte in range(256)]


def make_tokenizer(tokens):
    base = {token: rank for rank, token in enumerate(tokens)}
    return Tokenizer(base, {name: len(base) + number for number, name in enumerate(NAMES)})


def _merges():
    """Pairs and fours of bytes that are frequent in the examples; some end inside a character."""
    data = "".join(text for text, _ in EXAMPLES.values()).encode()
    pairs = Counter(data[start : start + 2] for start in range(len(data) - 1))
    fours = Counter(data[start : start + 4] for start in range(len(data) - 3))
    common = [token for token, _ in pairs.most_common(150)] + [token for token, _ in fours.most_common(100)]
    return [*common, "👋".encode()[:3], "世".encode()[1:]]


BYTEWISE = make_tokenizer(BYTES)
MERGED = make_tokenizer(list(dict.fromkeys(BYTES + _merges())))
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTEWISE, MERGED], ids=["bytes", "merges"])

_SPECIAL = re.compile("(" + "|".join(map(re.escape, NAMES)) + ")")


def encode(text, tokenizer=BYTEWISE, cut=None):
    """Ids of an output; ordinary text is also cut, and encoded apart, where `cut` says."""
    ids = []
    for number, part in enumerate(_SPECIAL.split(text)):
        if number % 2:
            ids.append(tokenizer.special_id(part))
        else:
            for piece in cut(part) if cut else [part]:
                ids += tokenizer.encode(piece)
    return ids


def joined(deltas):
    """What a client makes of the deltas, and the rules that it relies on."""
    message = {"role": "assistant", "content": ""}
    calls = []
    for delta in deltas:
        match delta:
            case ReasoningDelta():
                message["reasoning_content"] = message.get("reasoning_content", "") + delta.text
            case ContentDelta():
                message["content"] += delta.text
            case CallStart():
                assert delta.index == len(calls)
                function = {"name": delta.name, "arguments": ""}
                calls.append({"id": delta.id, "type": "function", "function": function})
                continue
            case CallArguments():
                assert delta.index == len(calls) - 1
                calls[-1]["function"]["arguments"] += delta.text
        assert delta.text
    if calls:
        message["tool_calls"] = calls
    return message


def parse(ids, *, tokenizer=BYTEWISE, every=False, **options):
    """The parser after all ids and `finish`. With `every`, its message is compared after each of them."""
    parser = OutputParser(tokenizer, **options)
    deltas = []
    for id in ids:
        deltas += parser.push(id)
        if every:
            assert parser.message == joined(deltas)
    finished = parser.finished
    deltas += parser.finish()
    assert parser.message == joined(deltas)
    assert parser.finished == finished
    assert parser.finish() == []
    for made in parser.message.get("tool_calls", []):
        assert isinstance(json.loads(made["function"]["arguments"], parse_constant=pytest.fail), dict)
    return parser


def read(text, **options):
    """The message of an output."""
    return parse(encode(text), **options).message


def arguments_of(*body):
    """The JSON text of a call's arguments."""
    [made] = read(answer("", "", call(*body)))["tool_calls"]
    return made["function"]["arguments"]
