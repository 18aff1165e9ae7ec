"""Outputs as they should not be: what becomes of them is documented, nothing is lost and nothing raises."""

import json

import numpy as np
import pytest
from chat_outputs import (
    ANSWERED,
    BYTEWISE,
    CALL,
    END,
    MERGED,
    NAMES,
    THOUGHT,
    TOKENIZERS,
    TOOLS,
    V,
    answer,
    argument,
    arguments_of,
    call,
    encode,
    opened,
    parse,
    read,
    said,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimi_jax.chat.parser import OutputParser

RESPONSE = "<|open|>response<|sep|>"
ONE_CALL = call()
CLOSE_TOOLS = "<|close|>tools<|sep|>"

# Endings of reasoning


@TOKENIZERS
@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("R<|close|>think<|sep|>" + RESPONSE + "B" + ANSWERED, said("R", "B")),
        ("R<|close|>think" + RESPONSE + "B" + ANSWERED, said("R", "B")),
        ("R<|close|>think<|open|>response" + ANSWERED, said("R", "")),
        ("R" + RESPONSE + "B" + ANSWERED, said("R", "B")),
        ("R<|close|>" + RESPONSE + "B" + ANSWERED, said("R<|close|>", "B")),
        ("R<|close|>think<|sep|>B" + ANSWERED, said("R", "B")),
        ("R<|close|>think\n\nB" + ANSWERED, said("R", "\n\nB")),
        ("R<|close|>think<|sep|>\n\n" + RESPONSE + "B" + ANSWERED, said("R", "B")),
        ("R<|open|>tools<|sep|>" + ONE_CALL + CLOSE_TOOLS, said("R", "", ("f", "{}"))),
        ("R<|close|>think<|open|>tools<|sep|>" + ONE_CALL + CLOSE_TOOLS, said("R", "", ("f", "{}"))),
        ("R<|close|>think<|sep|>" + ONE_CALL, said("R", "", ("f", "{}"))),
        ("R" + ONE_CALL + RESPONSE + "B", said("R", "B", ("f", "{}"))),
        ("R", said("R", "")),
        ("R<|close|>think<|sep|>", said("R", "")),
        # Not thought at all: the text is the answer, once that is clear.
        ("B" + ANSWERED, said("B", "B")),
        ("B<|close|>response", said("B", "B")),
        ("B" + TOOLS + ONE_CALL + CLOSE_TOOLS, said("B", "B", ("f", "{}"))),
        (ANSWERED, said()),
        # Closed by the wrong name: what follows is the answer.
        ("R" + ANSWERED + RESPONSE + "B" + ANSWERED, said("R", "B")),
        ("R" + ANSWERED + "B" + ANSWERED, said("R", "B")),
        # The generation prompt once more.
        ("<|open|>think<|sep|>R" + THOUGHT + "B" + ANSWERED, said("R", "B")),
        ('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>R' + THOUGHT + "B", said("R", "B")),
        (RESPONSE + "B" + ANSWERED, said("", "B")),
        # Thought twice.
        ("R" + THOUGHT + "B<|open|>think<|sep|>S" + THOUGHT + "C", said("RS", "BC")),
    ],
)
@pytest.mark.parametrize("ending", ["", "<|end_of_msg|>", "[EOS]", END, "<|close|>message<|end_of_msg|>"])
def test_endings_of_reasoning(tokenizer, output, message, ending):
    parser = parse(encode(output + ending, tokenizer), tokenizer=tokenizer, every=True)
    assert parser.message == message
    assert parser.finished == bool(ending)
    assert ending == END or not parser.complete


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("B", said("", "B")),
        ("<|open|>think<|sep|>R" + THOUGHT + "B", said("R", "B")),
        (RESPONSE + "B", said("", "B")),
        ("<|close|>think<|sep|>B", said("", "B")),
        ("B" + ANSWERED + ANSWERED, said("", "B")),
    ],
)
@pytest.mark.parametrize("ending", ["", ANSWERED, END, ANSWERED + END])
def test_endings_in_instruct_mode(output, message, ending):
    assert read(output + ending, thinking=False) == message


@pytest.mark.parametrize(
    ("output", "complete"),
    [
        (answer("R", "B"), True),
        ("R" + RESPONSE + "B" + ANSWERED + END, True),
        ("R" + THOUGHT + "B" + END, False),
        ("R" + THOUGHT + "B" + ANSWERED + "<|end_of_msg|>", False),
        ("R" + THOUGHT + "B" + ANSWERED + "<|close|>message<|sep|>x<|end_of_msg|>", False),
        ("R" + THOUGHT + "B" + ANSWERED + "<|close|>message<|end_of_msg|>", False),
        ("R" + THOUGHT + "B" + ANSWERED + "<|close|>message\n<|end_of_msg|>", False),
        (answer("R", "B", ONE_CALL), True),
        (THOUGHT + TOOLS + ONE_CALL + END, False),
        (THOUGHT + TOOLS + CALL + CLOSE_TOOLS + END, False),
        (answer("R", "B", CALL, ONE_CALL), False),
        (answer("R", "B", call(opened("v"))), False),
        (answer("R", "B", call(opened("v"), argument("w"))), False),
        (answer("R", "B", call(argument("w", type="number"))), True),
    ],
)
def test_complete_means_that_all_was_closed(output, complete):
    parser = parse(encode(output))
    assert (parser.finished, parser.complete) == (True, complete)


@TOKENIZERS
@pytest.mark.parametrize(
    ("body", "closed"),
    [
        ("", True),
        (ONE_CALL, True),
        (ONE_CALL + "\n", True),
        (ONE_CALL + CLOSE_TOOLS, True),
        (ONE_CALL + CLOSE_TOOLS + "<|close|>message<|sep|>", True),
        (call(argument("v"), argument("1", "l", "number")), True),
        (CALL + argument("v") + "<|close|>call", True),
        (ONE_CALL + "<|open|>", True),
        (ONE_CALL + '<|open|>call tool="g', True),  # has not begun
        (CALL, False),
        (CALL + argument("v"), False),
        (CALL + '<|open|>argument key="', False),
        (CALL + opened("v"), False),
        (CALL + opened("v") + "<|close|>argument", False),
        (CALL + opened("v") + "<|close|>call<|sep|>", False),
        (CALL + argument("v") + CLOSE_TOOLS, False),
        (CALL + argument("v") + "<|close|>message<|sep|>", False),
        (CALL + ONE_CALL, False),
        (CALL + '<|open|>json type="object"<|sep|>{}<|close|>call<|sep|>', False),
        (CALL + '<|open|>message role="user"<|sep|>', False),
        (ONE_CALL + '<|open|>message role="user"<|sep|>', True),
    ],
)
def test_whether_calls_are_whole(tokenizer, body, closed):
    ids = encode(THOUGHT + TOOLS + body, tokenizer)
    for end in ([], [tokenizer.end_of_msg_id], [tokenizer.eos_id]):
        assert parse([*ids, *end], tokenizer=tokenizer).calls_closed == closed


def test_calls_are_not_whole_while_one_is_written():
    parser = OutputParser(BYTEWISE)
    found = []
    for part in (THOUGHT + TOOLS, CALL, opened("v"), V, "<|close|>call<|sep|>", CALL):
        for id in encode(part):
            parser.push(id)
        found.append(parser.calls_closed)
    assert found == [True, False, False, False, True, False]


@pytest.mark.parametrize("end", ["", "<|end_of_msg|>"])
@pytest.mark.parametrize(
    "opening", ['<|open|>call tool="', "<|open|>call ", '<|open|>message role="', '<|open|>json type="']
)
def test_a_header_that_is_cut_loses_no_more_than_its_bound(opening, end):
    header = opening + "é" * (256 + len("<|open|>") - len(opening))
    assert read(THOUGHT + CALL + header + end) == said("", "", ("f", "{}"))
    assert read(THOUGHT + CALL + header + "é" + end) == said("", header + "é", ("f", "{}"))
    assert read(THOUGHT + header + "é" + end) == said("", header + "é")


# In the answer and between elements


@TOKENIZERS
@pytest.mark.parametrize(
    ("body", "content"),
    [
        ('a<|open|>foo bar="x"<|sep|>b<|close|>foo<|sep|>c', None),
        ("a<|open|>tool-declare<|sep|>b", None),
        ("a<|open|>think-more<|sep|>b", None),
        ("a<|open|>responses", None),
        ("a<|open|> response<|sep|>b", None),
        ("a<|open|><|sep|>b<|close|><|sep|>", None),
        ("a<|open|><|open|><|close|><|sep|>", None),
        ("a<|open|>call tool=f<|sep|>b", None),
        ('a<|open|>call tool="f<|sep|>b', None),
        ('a<|open|>call tool="f" now<|sep|>b', None),
        ("a<|open|>call\n<|sep|>b", None),
        ("a<|sep|>b", None),
        ("a[BOS][EOT]<|media_pad|>b", None),
        ("a<|open|>frog b", None),
        # No call that they could belong to.
        ("a" + argument("v") + "b", "a" + opened("v") + "b"),
        ('a<|open|>json type="object"<|sep|>{}<|close|>json<|sep|>b', 'a<|open|>json type="object"<|sep|>{}b'),
        # Closes of what is not open do nothing.
        ("a<|close|>think<|sep|>b<|close|>tools<|sep|>c<|close|>call<|sep|>d", "abcd"),
        # A header without its end.
        ("a<|open|>response\nb", "a\nb"),
        ("a<|open|>responseHello", "aHello"),
        ("a<|close|>response\nb", "a\nb"),
        # Channels come twice, or text stands between them.
        ("a" + ANSWERED + " \n" + RESPONSE + " b", "a b"),
        ("a" + ANSWERED + " \nb ", "a \nb"),
        ("a" + ANSWERED + " b c \n" + ANSWERED, "a b c"),
        ("a" + ANSWERED + "<|open|>frog<|sep|><|sep|>", "a<|open|>frog<|sep|>"),
        ("a<|close|>message<|sep|>b", "ab"),
        # Another message is not ours.
        ('a<|close|>message<|sep|><|open|>message role="user"<|sep|>b', "a"),
        ('a<|open|>message role="user"<|sep|>b', "a"),
        ('a<|close|>message<|sep|><|open|>message role="assistant"<|sep|>b', "a"),
        ("a" + ANSWERED + '<|close|>message<|sep|><|open|>message role="assistant"<|sep|>b', "a"),
        # Ours, once more.
        ('a<|open|>message role="assistant"<|sep|>b', "ab"),
        ("a<|open|>message<|sep|>b", "ab"),
        ("a" + ANSWERED + '<|open|>message role="assistant"<|sep|>' + RESPONSE + "b", "ab"),
    ],
)
def test_malformed_content(tokenizer, body, content):
    for end in ("", "<|end_of_msg|>"):
        parser = parse(encode(THOUGHT + body + end, tokenizer), tokenizer=tokenizer, every=True)
        assert parser.message == said("", body if content is None else content)


def test_another_message_ends_the_reading():
    parser = parse(encode(answer("R", "B").removesuffix("<|end_of_msg|>") + '<|open|>message role="user"<|sep|>C'))
    assert parser.message == said("R", "B")
    assert (parser.finished, parser.complete) == (True, False)
    assert parse(encode('<|open|>message role="user"<|sep|>C')).message == said()


@pytest.mark.parametrize("id", [-1, 264, 2**40, np.int32(300)])
def test_id_outside_the_vocabulary(id):
    assert BYTEWISE.vocab_size == 264
    assert parse([*encode("a"), id, *encode("b")]).message == said("a\ufffdb")
    assert parse([*encode("a"), 0xE4, id, *encode("b")]).message == said("a\ufffd\ufffdb")


# In the tools channel


@pytest.mark.parametrize(
    ("body", "message"),
    [
        # Text is part of the answer, white space is nothing.
        ("\n" + ONE_CALL + "\n so \n" + ONE_CALL, said("", "\n so", ("f", "{}"), ("f", "{}"))),
        (CALL + "\nx" + argument("1", type="number"), said("", "\nx", ("f", '{"k": 1}'))),
        # Missing closes.
        (
            CALL + opened("v") + opened("1", "l", "number") + ONE_CALL,
            said("", "", ("f", '{"k": "v", "l": 1}'), ("f", "{}")),
        ),
        (CALL + opened("v") + RESPONSE + "B", said("", "B", ("f", '{"k": "v"}'))),
        (CALL + opened("v") + "<|close|>call<|sep|>" + ONE_CALL, said("", "", ("f", '{"k": "v"}'), ("f", "{}"))),
        (CALL + opened("v") + CLOSE_TOOLS + "B", said("", "B", ("f", '{"k": "v"}'))),
        # Missing separators.
        (
            '<|open|>call tool="f"' + opened("v") + "<|close|>argument<|close|>call<|close|>tools",
            said("", "", ("f", '{"k": "v"}')),
        ),
        # Markup inside a value that does not belong there.
        (
            call(argument("a<|open|>b<|sep|>c<|close|>response<|sep|>d<|sep|>")),
            said("", "", ("f", '{"k": "a<|open|>b<|sep|>cd<|sep|>"}')),
        ),
        # Missing names.
        ("<|open|>call<|sep|><|close|>call<|sep|>", said("", "", ("", "{}"))),
        (CALL + '<|open|>argument type="string"<|sep|>v', said("", "", ("f", '{"": "v"}'))),
        # A call that is cut before it has begun.
        ('<|open|>call tool="f"', said()),
        ('<|open|>call tool="f" ', said()),
        ('<|open|>call tool="f" ind', said()),
        ('<|open|>call tool="f" index=', said()),
        ('<|open|>call tool="f" index="1', said()),
        ('<|open|>call tool="f" oops no', said("", '<|open|>call tool="f" oops no')),
        # A second tools channel.
        (ONE_CALL + "<|open|>tools<|sep|>" + ONE_CALL, said("", "", ("f", "{}"), ("f", "{}"))),
    ],
)
def test_malformed_calls(body, message):
    assert read(THOUGHT + TOOLS + body) == message
    assert read(THOUGHT + TOOLS + body + "<|end_of_msg|>") == message


def test_calls_outside_tools():
    assert read("R" + THOUGHT + "B" + ONE_CALL) == said("R", "B", ("f", "{}"))


# Anything


PIECES = [
    *NAMES[1:6],
    *("message", "think", "response", "tools", "call", "argument", "json"),
    *(' tool="', ' key="', ' type="', 'string"', 'f"', "&quot;", ' role="assistant"'),
    *("{", "}", "[1]", '"', "\\", "12", "x", " ", "\n", "世"),
]
SOUP = st.one_of(st.sampled_from(PIECES), st.sampled_from(NAMES[3:6]), st.integers(-2, BYTEWISE.vocab_size + 2))


@settings(deadline=None, max_examples=150)
@given(st.lists(SOUP, max_size=60), st.booleans())
@example(["<|open|>", "call", "<|sep|>", "<|open|>", "json", "<|sep|>", "{", "<|open|>", "think"], True)
def test_any_ids_at_all(pieces, thinking):
    ids = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else encode(piece)
    parse(ids, every=True, thinking=thinking)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(NAMES[3:6])), max_size=60), st.integers(1, 9))
def test_tokens_of_malformed_output_may_end_anywhere(pieces, length):
    def cut(text):
        return [text[start : start + length] for start in range(0, len(text), length)]

    text = "".join(pieces)
    whole, bytewise = parse(encode(text, MERGED), tokenizer=MERGED), parse(encode(text))
    cut_up = parse(encode(text, MERGED, cut), tokenizer=MERGED)
    assert whole.message == bytewise.message == cut_up.message
    assert whole.complete == bytewise.complete == cut_up.complete


TAGS = [
    *(f"<|open|>{tag}<|sep|>" for tag in ("think", "response", "tools", "json", "frog")),
    *(
        f"<|close|>{tag}<|sep|>"
        for tag in ("message", "think", "response", "tools", "call", "argument", "json", "frog")
    ),
    *(CALL, opened(""), opened("", type="number"), "<|open|>", "<|close|>", "<|sep|>", "[BOS]"),
]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(TAGS), max_size=30), st.booleans())
def test_no_text_is_lost(tags, thinking):
    """Numbered texts after tags in any order all come out, in reasoning, answer or arguments, and in order there."""
    texts = [f"T{number}." for number in range(len(tags))]
    ids = encode("".join(tag + text for tag, text in zip(tags, texts, strict=True)))
    message = parse(ids, thinking=thinking).message
    found = json.dumps(message)
    assert [text for text in texts if text not in found] == []


# Values


@pytest.mark.parametrize(
    ("type", "value", "arguments"),
    [
        ("string", "", '{"k": ""}'),
        ("string", "3", '{"k": "3"}'),
        ("string", '&lt;div&gt; "x" \\n </y>\n\t\x00', r'{"k": "&lt;div&gt; \"x\" \\n </y>\n\t\u0000"}'),
        ("number", "1e2", '{"k": 1e2}'),
        ("number", "-0.10", '{"k": -0.10}'),
        ("number", " 12\n", '{"k":  12\n}'),
        ("number", "9" * 4_300, '{"k": ' + "9" * 4_300 + "}"),
        ("object", '{"b": 2,"a" : 1, "b": 3}', '{"k": {"b": 2,"a" : 1, "b": 3}}'),
        ("array", "[1, 2,  3]", '{"k": [1, 2,  3]}'),
        ("array", r'["\ud800\u00e9"]', r'{"k": ["\ud800\u00e9"]}'),
        # JSON, though not of the type that was said
        ("number", "true", '{"k": true}'),
        ("boolean", '"yes"', '{"k": "yes"}'),
        # No JSON
        ("number", "12abc", '{"k": "12abc"}'),
        ("number", "", '{"k": ""}'),
        ("number", "NaN", '{"k": "NaN"}'),
        ("number", "-Infinity", '{"k": "-Infinity"}'),
        ("number", "9" * 4_301, '{"k": "' + "9" * 4_301 + '"}'),
        ("number", "01", '{"k": "01"}'),
        ("boolean", "True", '{"k": "True"}'),
        ("null", "None", '{"k": "None"}'),
        ("object", "{", '{"k": "{"}'),
        ("object", "{'a': 1}", '{"k": "{\'a\': 1}"}'),
        ("object", '{"a": 1} x', r'{"k": "{\"a\": 1} x"}'),
        ("array", "[NaN]", '{"k": "[NaN]"}'),
        ("array", '["a\nb"]', r'{"k": "[\"a\nb\"]"}'),
        ("array", "\u00a0[]", '{"k": "\u00a0[]"}'),
        # Types that there are not
        ("integer", "3", '{"k": 3}'),
        ("String", "abc", '{"k": "abc"}'),
        ("", "[]", '{"k": []}'),
    ],
)
def test_values(type, value, arguments):
    assert arguments_of(argument(value, type=type)) == arguments


def test_values_without_a_type():
    untyped = '<|open|>argument key="k"<|sep|>'
    assert arguments_of(untyped + "3<|close|>argument<|sep|>") == '{"k": 3}'
    assert arguments_of(untyped + "x y<|close|>argument<|sep|>") == '{"k": "x y"}'


def test_repeated_keys_all_stay():
    assert arguments_of(argument("1", type="number"), argument("2")) == '{"k": 1, "k": "2"}'


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_values(opening, closing):
    def nested(depth):
        return opening * depth + '"[\\"["' + closing * depth

    assert arguments_of(argument(nested(100), type="array")) == '{"k": ' + nested(100) + "}"
    for depth in (101, 10_000):
        assert json.loads(arguments_of(argument(nested(depth), type="array"))) == {"k": nested(depth)}
    wide = "[" + ",".join([nested(1)] * 200) + "]"
    assert arguments_of(argument(wide, type="array")) == '{"k": ' + wide + "}"


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        ('{"a": 1,"b" :[2]}', '{"a": 1,"b" :[2]}'),
        ('\n{ "a": 1 } ', '{ "a": 1 }'),
        ("{}", "{}"),
        ("", '{"json": ""}'),
        ('{"command": oops', r'{"json": "{\"command\": oops"}'),
        ("[1]", '{"json": "[1]"}'),
    ],
)
def test_raw_block(raw, arguments):
    block = f'<|open|>json type="object"<|sep|>{raw}<|close|>json<|sep|>'
    assert arguments_of(block) == arguments
    zero = argument("0", type="number")
    members = "" if arguments == "{}" else ", " + arguments[1:-1]
    assert arguments_of(zero, block, zero) == '{"k": 0' + members + ', "k": 0}'
