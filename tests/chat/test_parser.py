"""Generated ids to messages: outputs as they should be, in any tokens, and stopped anywhere."""

import json

import numpy as np
import pytest
from chat_outputs import (
    ANSWERED,
    BYTES,
    BYTEWISE,
    CALL,
    END,
    EXAMPLES,
    MERGED,
    THOUGHT,
    TOKENIZERS,
    TOOLS,
    V,
    answer,
    argument,
    call,
    encode,
    make_tokenizer,
    opened,
    parse,
    said,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.chat.parser import CallArguments, CallStart, ContentDelta, OutputParser, ReasoningDelta
from kimi_jax.chat.tokenizer import Tokenizer, TokenizerError

# Outputs as they should be


@TOKENIZERS
@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_examples(tokenizer, name):
    text, message = EXAMPLES[name]
    ids = encode(text, tokenizer)
    parser = parse(ids, tokenizer=tokenizer, every=True)
    assert parser.message == message
    assert (parser.finished, parser.complete) == (True, True)
    # The released model also ends with [EOS].
    parser = parse([*ids[:-1], tokenizer.eos_id], tokenizer=tokenizer)
    assert parser.message == message
    assert (parser.finished, parser.complete) == (True, True)


@TOKENIZERS
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pong" + ANSWERED + END, said("", "pong")),
        (TOOLS + call() + "<|close|>tools<|sep|>" + END, said("", "", ("f", "{}"))),
    ],
)
def test_instruct_mode(tokenizer, text, message):
    parser = parse(encode(text, tokenizer), tokenizer=tokenizer, every=True, thinking=False)
    assert parser.message == message
    assert parser.complete


def test_deltas_one_by_one():
    parser = OutputParser(BYTEWISE)
    text = "ab" + THOUGHT + "c" + TOOLS + CALL.removesuffix("<|sep|>")
    deltas = [delta for id in encode(text) for delta in parser.push(id)]
    assert deltas == [ReasoningDelta("a"), ReasoningDelta("b"), ContentDelta("c")]
    # The call is known as soon as its header ends.
    assert parser.push(BYTEWISE.special_id("<|sep|>")) == [CallStart(0, "f:0", "f")]
    text = argument('x\n"', "s") + argument("12", "n", "number") + "<|close|>call<|sep|>"
    assert [delta for id in encode(text) for delta in parser.push(id)] == [
        CallArguments(0, '{"s": "'),
        CallArguments(0, "x"),
        CallArguments(0, "\\n"),
        CallArguments(0, '\\"'),
        CallArguments(0, '"'),
        CallArguments(0, ', "n": '),
        CallArguments(0, "12"),
        CallArguments(0, "}"),
    ]


def test_string_arguments_flow():
    parser = OutputParser(MERGED)
    for id in encode(THOUGHT + TOOLS + CALL + opened(""), MERGED):
        parser.push(id)
    ids = MERGED.encode("line of code\n" * 1_600)
    assert len(ids) > 5_000
    arguments = '{"k": "'
    for count, id in enumerate(ids, 1):
        [delta] = parser.push(id)
        arguments += delta.text
        if count % 1_000 == 0:
            assert json.loads(arguments + '"}') == {"k": MERGED.decode(ids[:count])}
    assert parser.message["tool_calls"][0]["function"]["arguments"] == arguments


def test_call_ids_go_on_from_earlier_calls():
    text, _ = EXAMPLES["no arguments"]
    parser = parse(encode(text), first_call=7)
    assert [call["id"] for call in parser.message["tool_calls"]] == ["now:7", "now:8", "f:9"]


def test_ids_may_be_of_numpy():
    text, message = EXAMPLES["E6"]
    assert parse(np.array(encode(text))).message == message


def test_ids_after_the_end_are_ignored():
    text, message = EXAMPLES["E6"]
    parser = OutputParser(BYTEWISE)
    for id in encode(text):
        parser.push(id)
    more = encode("more<|open|>tools<|sep|>")
    assert [parser.push(id) for id in more] == [[] for _ in more]
    assert parser.finish() == []
    assert parser.message == message
    assert parser.complete


def test_vocabulary_without_the_markers():
    with pytest.raises(TokenizerError, match=r"no special token '<\|open\|>'"):
        OutputParser(Tokenizer({byte: rank for rank, byte in enumerate(BYTES)}, {"[EOS]": 256}))


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("gtasks_list-x", "gtasks_list-x"),
        ("a&quot;b", 'a"b'),
        ("a&amp;quot;b", "a&quot;b"),
        ("a&lt;b", "a&lt;b"),
        ("a<b>/c.d:e", "a<b>/c.d:e"),
        ("a b=c", "a b=c"),
        ("a\nb", "a\nb"),
        ("搜索 👋", "搜索 👋"),
        ("&amp;&quot;", '&"'),
        ("&", "&"),
        ("", ""),
        ("</call>", "</call>"),
    ],
)
def test_attributes(attribute, name):
    [made] = parse(encode(answer("", "", call(argument("v", attribute), name=attribute)))).message["tool_calls"]
    assert (made["id"], made["function"]["name"]) == (f"{name}:0", name)
    assert json.loads(made["function"]["arguments"]) == {name: "v"}


# Markers are ids


@TOKENIZERS
def test_spelled_markers_are_text(tokenizer):
    text = EXAMPLES["E6"][0] + "[EOS]<|media_pad|>"
    spelled = tokenizer.encode(text)

    def with_spelled(output):
        ids = [spelled if number else [] for number in range(output.count("@") + 1)]
        parts = [encode(part, tokenizer) for part in output.split("@")]
        return [id for before, part in zip(ids, parts, strict=True) for id in before + part]

    output = answer("@", "@", call(argument("@")))
    parser = parse(with_spelled(output), tokenizer=tokenizer)
    assert parser.message == said(text, text, ("f", json.dumps({"k": text}, ensure_ascii=False)))
    assert parser.complete


def test_spelled_marker_in_a_header_is_part_of_it():
    ids = encode(THOUGHT + TOOLS + "<|open|>") + BYTEWISE.encode('call tool="<|sep|>') + encode('"<|sep|>')
    assert parse(ids).message == said("", "", ("<|sep|>", "{}"))


# In any tokens, and stopped anywhere


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(EXAMPLES)), st.randoms(use_true_random=False), st.sampled_from([BYTEWISE, MERGED]))
def test_tokens_may_end_anywhere(name, source, tokenizer):
    def cut(text):
        places = sorted(source.sample(range(len(text) + 1), source.randint(0, len(text))))
        return [text[start:end] for start, end in zip([0, *places], [*places, None], strict=True)]

    text, message = EXAMPLES[name]
    assert parse(encode(text, tokenizer, cut), tokenizer=tokenizer).message == message


def is_beginning(part, whole):
    """Whether `part` is the beginning of `whole`, but for a character that was cut, or a JSON value that was."""
    if isinstance(whole, str):
        return whole.startswith(part.removesuffix("\ufffd"))
    return part == whole or isinstance(part, str) or str(whole).startswith(str(part))


def check_beginning(message, whole):
    assert is_beginning(message.get("reasoning_content", ""), whole.get("reasoning_content", ""))
    assert is_beginning(message["content"], whole["content"])
    calls = message.get("tool_calls", [])
    for last, made, full in zip(range(1 - len(calls), 1), calls, whole.get("tool_calls", []), strict=False):
        assert (made["id"], made["function"]["name"]) == (full["id"], full["function"]["name"])
        arguments = json.loads(made["function"]["arguments"])
        expected = json.loads(full["function"]["arguments"])
        assert arguments == expected or last == 0
        assert list(arguments) == list(expected)[: len(arguments)]
        for place, (key, value) in enumerate(arguments.items(), 1):
            assert is_beginning(value, expected[key]) if place == len(arguments) else value == expected[key]


@TOKENIZERS
@pytest.mark.parametrize("name", EXAMPLES)
def test_output_may_stop_anywhere(tokenizer, name):
    text, whole = EXAMPLES[name]
    ids = encode(text, tokenizer)
    for count in range(len(ids)):
        parser = parse(ids[:count], tokenizer=tokenizer)
        assert (parser.finished, parser.complete) == (False, False)
        assert len(parser.message.get("tool_calls", [])) <= len(whole.get("tool_calls", []))
        check_beginning(parser.message, whole)
        if count < len(ids) - 1:
            stopped = parse([*ids[:count], tokenizer.end_of_msg_id], tokenizer=tokenizer)
            assert (stopped.finished, stopped.complete) == (True, False)
            assert stopped.message == parser.message


# Characters cut in two


def test_character_over_tokens():
    family = "👩‍👩‍👧"
    parser = OutputParser(BYTEWISE)
    parts = [parser.push(byte) for byte in family.encode()]
    assert [delta.text for [delta] in filter(None, parts)] == list(family)
    assert parser.message == said(family)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("", "", said("\ufffd")),
        (THOUGHT, END, said("", "\ufffd")),
        (THOUGHT + ANSWERED, END, said("", "\ufffd")),
        (THOUGHT + TOOLS + CALL + opened("a"), "", said("", "", ("f", '{"k": "a\ufffd"}'))),
        (THOUGHT + TOOLS + CALL + opened("a"), "b" + V, said("", "", ("f", '{"k": "a\ufffdb"}'))),
        (THOUGHT + TOOLS + CALL + opened("["), "", said("", "", ("f", '{"k": "[\ufffd"}'))),
        (THOUGHT + TOOLS + CALL + opened('["', type="array"), '"]' + V, said("", "", ("f", '{"k": ["\ufffd"]}'))),
        (THOUGHT + TOOLS + '<|open|>call tool="f', '"<|sep|>', said("", "", ("f\ufffd", "{}"))),
        (THOUGHT + TOOLS + '<|open|>call tool="f', "", said()),
    ],
)
def test_character_cut_in_each_place(count, before, after, message):
    half = list("👋".encode()[:count])
    assert parse(encode(before) + half + encode(after), every=True).message == message


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(st.integers(0x80, 0xFF), st.integers(0, MERGED.num_base - 1)), max_size=30))
def test_text_is_the_full_decode(ids):
    assert parse(ids, tokenizer=MERGED).message == said(MERGED.decode(ids))


# Size


def test_a_megabyte_of_text():
    """Three tokens for six bytes, one of them half a character."""
    text = 'x\n"\\é' * 170_000
    tokenizer = make_tokenizer([*BYTES, b'x\n"', b"\\\xc3"])
    ids = encode(THOUGHT + TOOLS + CALL + opened(""), tokenizer) + [256, 257, 0xA9] * 170_000 + encode(V, tokenizer)
    parser = OutputParser(tokenizer)
    for id in ids:
        parser.push(id)
    parser.finish()
    assert json.loads(parser.message["tool_calls"][0]["function"]["arguments"]) == {"k": text}


@pytest.mark.parametrize(
    ("output", "calls", "content"),
    [
        (TOOLS + CALL + opened("[" + "1, " * 70_000 + "1]", type="array"), 1, 0),
        (TOOLS + CALL + opened("[" * 100_000 + "]" * 100_000, type="array"), 1, 0),
        (TOOLS + '<|open|>call tool="' + "a" * 200_000, 0, 200_019),
        (TOOLS + "<|open|>call" + ' a=""' * 40_000, 0, 200_012),
        (TOOLS + "<|open|>call" + ' tool="a' * 25_000 + '"<|sep|>', 0, 200_020),
        (TOOLS + "<|open|>call" + ' a=""' * 40_000 + "<|sep|>", 1, 0),
        (TOOLS + "<|open|>call" + " a" * 100_000, 0, 200_012),
        (TOOLS + " \n" * 100_000 + "x", 0, 200_001),
        ("<|open|>" * 30_000, 0, 239_992),
        (ANSWERED * 10_000, 0, 0),
        (("<|open|>think<|sep|>a" + ANSWERED) * 6_000 + END, 0, 1),
        (TOOLS + CALL * 8_000, 8_000, 0),
    ],
)
def test_long_outputs(output, calls, content):
    """A quadratic step in any of these would take minutes."""
    parser = OutputParser(BYTEWISE)
    for id in encode(THOUGHT + output):
        parser.push(id)
    parser.finish()
    assert len(parser.message.get("tool_calls", [])) == calls
    assert len(parser.message["content"]) == content
