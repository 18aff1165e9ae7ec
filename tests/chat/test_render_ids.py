"""Token ids of the worked examples, with as much of the real vocabulary as has been published with them."""

import os

import pytest

from kimi_jax.chat.render import build_segments, render, segments_ids
from kimi_jax.chat.tokenizer import Tokenizer

NUM_BASE = 163_584
SPECIAL = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|end_of_msg|>": 163586,
    "<|open|>": 163587,
    "<|close|>": 163588,
    "<|sep|>": 163589,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
}

# The text of each published id. Where a published text is one piece but several ids ("-effort", "_effort",
# " greets", "-declare"), how it is cut is our reading.
WORDS = {
    2778: "message",
    6244: " role",
    1530: " name",
    1798: " type",
    4453: " tool",
    4002: " index",
    2355: " key",
    878: '="',
    2482: "user",
    14062: "system",
    69702: "assistant",
    20960: "tool",
    39964: "think",
    12092: "response",
    25385: "tools",
    10257: "call",
    47185: "argument",
    2033: "string",
    10006: "number",
    16849: "boolean",
    6562: "null",
    3721: "object",
    4392: "array",
    120083: "-decl",
    677: "are",
    130400: "thinking",
    59991: "-eff",
    470: "ort",
    135230: "-choice",
    46906: "-format",
    123074: "_eff",
    5376: "What",
    387: " is",
    715: " +",
    15203: "ping",
    886: "ong",
    28560: " guides",
    418: " on",
    1632: " how",
    2455: " much",
    308: " to",
    2704: " think",
    306: " in",
    651: " your",
    9545: " thinking",
    8491: " channel",
    347: " (",
    2976: "not",
    3411: " including",
    276: " the",
    4503: " response",
    904: "),",
    9141: " supported",
    4661: " values",
    3867: " include",
    1268: " `",
    1332: "low",
    5713: "`,",
    50004: "medium",
    19421: "high",
    316: " and",
    5354: "max",
    16518: "`.\n",
    10048: "Now",
    2403: " system",
    42070: " invoked",
    472: " with",
    105281: "=max",
    11369: "`.",
    3900: "You",
    554: " are",
    261: " a",
    13205: " helpful",
    26626: " assistant",
    18699: "Hi",
    1008: "The",
    2742: " user",
    23320: " gre",
    2088: "ets",
    1019: " me",
    19180: "Hello",
    3653: " How",
    691: " can",
    374: " I",
    1833: " help",
    69211: "Tell",
    49759: " joke",
}

# Merges on the way to a token that can be part of a piece, as in "`thinking"; their ids are not published.
STEPS = {
    300: "ff",
    301: "eff",
    302: "or",
    303: "on",
    305: "ar",
    307: "de",
    309: "cl",
    310: "decl",
    311: "gr",
    312: " gr",
    313: "et",
    314: "th",
    315: "in",
    317: "thin",
    318: "kin",
    319: "king",
    320: "lo",
    321: "hi",
    322: "gh",
}


@pytest.fixture(scope="module")
def tokenizer():
    """The bytes' and the words' ids are K3's; all others are of bytes that never come."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = {id: bytes([byte]) for id, byte in enumerate(shown + [b for b in range(256) if b not in shown])}
    tokens |= {id: text.encode() for id, text in (WORDS | STEPS).items()}
    base = {tokens.get(id, b"\xff\xff" + id.to_bytes(3, "big")): id for id in range(NUM_BASE)}
    taken = set(SPECIAL.values())
    reserved = {f"<|reserved_token_{id}|>": id for id in range(NUM_BASE, NUM_BASE + 256) if id not in taken}
    return Tokenizer(base, SPECIAL | reserved)


@pytest.fixture(params=["published words", "whole vocabulary"])
def published(request, tokenizer):
    """For what is published id by id: also the real vocabulary, which cannot be shipped."""
    if request.param == "published words":
        return tokenizer
    directory = os.environ.get("KIMI_K3_TOKENIZER")
    if directory is None:
        pytest.skip("KIMI_K3_TOKENIZER names no directory with K3's tiktoken.model")
    return Tokenizer.from_file(os.path.join(directory, "tiktoken.model"), expected_vocab_size=163_840)


def numbers(text):
    return [int(id) for id in text.split()]


USER = numbers("163587 2778 6244 878 2482 1 163589")
ASSISTANT = numbers("163587 2778 6244 878 69702 1 163589")
END = numbers("163588 2778 163589 163586")
THINK = numbers("163587 39964 163589")
THOUGHT = numbers("163588 39964 163589")
RESPONSE = numbers("163587 12092 163589")
RESPONDED = numbers("163588 12092 163589")
QUESTION = numbers(
    "163587 2778 6244 878 2482 1 163589 5376 387 220 17 715 220 17 30 163588 2778 163589 163586 "
    "163587 2778 6244 878 69702 1 163589 163587 39964 163589"
)
EFFORT_MAX = numbers(
    "163587 2778 6244 878 14062 1 1798 878 130400 59991 470 1 163589 63 130400 123074 470 63 28560 418 1632 2455 308 "
    "2704 306 651 9545 8491 347 2976 3411 276 4503 8491 904 9141 4661 3867 1268 1332 5713 1268 50004 5713 1268 19421 "
    "5713 316 1268 5354 16518 10048 276 2403 387 42070 472 1268 130400 123074 470 105281 11369 163588 2778 163589 "
    "163586"
)


def test_question(published):
    """E1."""
    message = {"role": "user", "content": "What is 2 + 2?"}
    assert segments_ids(build_segments([message]), published) == QUESTION


@pytest.mark.parametrize(("effort", "ids"), [("max", [105281]), ("low", [28, 1332]), ("high", [28, 19421])])
def test_effort(published, effort, ids):
    """E2."""
    at = EFFORT_MAX.index(105281)
    message = {"role": "user", "content": "What is 2 + 2?"}
    expected = EFFORT_MAX[:at] + ids + EFFORT_MAX[at + 1 :] + QUESTION
    assert segments_ids(render([message], effort=effort), published) == expected


def test_three_turns(published):
    """E3."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "reasoning_content": "The user greets me.", "content": "Hello! How can I help?"},
        {"role": "user", "content": "Tell me a joke."},
    ]
    expected = numbers("163587 2778 6244 878 14062 1 163589 3900 554 261 13205 26626 13") + END
    expected += USER + numbers("18699 0") + END
    expected += ASSISTANT + THINK + numbers("1008 2742 23320 2088 1019 13") + THOUGHT
    expected += RESPONSE + numbers("19180 0 3653 691 374 1833 30") + RESPONDED + END
    expected += USER + numbers("69211 1019 261 49759 13") + END + ASSISTANT + THINK
    assert segments_ids(build_segments(messages), published) == expected


def test_instruct_mode(published):
    """E4."""
    expected = numbers(
        "163587 2778 6244 878 2482 1 163589 15203 163588 2778 163589 163586 "
        "163587 2778 6244 878 69702 1 163589 163587 12092 163589"
    )
    assert segments_ids(render([{"role": "user", "content": "ping"}], thinking=False), published) == expected


def test_empty_thinking(published):
    """E5."""
    messages = [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]
    expected = numbers(
        "163587 2778 6244 878 2482 1 163589 15203 163588 2778 163589 163586 163587 2778 6244 878 69702 1 163589 "
        "163587 39964 163589 163588 39964 163589 163587 12092 163589 79 886 163588 12092 163589 163588 2778 163589 "
        "163586"
    )
    assert segments_ids(build_segments(messages, add_generation_prompt=False), published) == expected


def test_calls_and_results(tokenizer):
    """E-16: a tool conversation of three turns, by the published ids of the words of the format."""
    calls = [{"id": "1", "function": {"name": "ping", "arguments": '{"max": true, "low": [2]}'}}]
    messages = [
        {"role": "user", "content": "ping"},
        {"role": "assistant", "reasoning_content": "think", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "pong"},
    ]
    expected = USER + [15203] + END + ASSISTANT + THINK + [39964] + THOUGHT + RESPONSE + RESPONDED
    expected += numbers("163587 25385 163589 163587 10257 4453 878 15203 1 4002 878 16 1 163589")
    expected += numbers("163587 47185 2355 878 5354 1 1798 878 16849 1 163589 83 81 84 68 163588 47185 163589")
    expected += numbers("163587 47185 2355 878 1332 1 1798 878 4392 1 163589 58 17 60 163588 47185 163589")
    expected += numbers("163588 10257 163589 163588 25385 163589") + END
    expected += numbers("163587 2778 6244 878 20960 1 4453 878 15203 1 4002 878 16 1 163589 79 886") + END
    assert segments_ids(build_segments(messages, add_generation_prompt=False), tokenizer) == expected


def test_headers_of_option_messages(published):
    """Their types are cut as published."""
    segments = build_segments(
        [], tools=[{}], tool_choice="none", response_format={"type": "json_object"}, add_generation_prompt=False
    )
    header = numbers("163587 2778 6244 878 14062 1 1798 878")
    ids = segments_ids(segments, published)
    starts = [at for at, id in enumerate(ids) if id == 163587]
    found = [ids[start : ids.index(163589, start)] for start in starts]
    assert found == [
        header + numbers("20960 120083 677 1"),
        header + numbers("20960 135230 1"),
        header + numbers("12092 46906 1"),
    ]


def test_image(published):
    """E13: one pad for the whole image."""
    message = {"role": "user", "content": [{"type": "image", "width": 20, "height": 2}]}
    ids = segments_ids(build_segments([message], add_generation_prompt=False), published)
    words = published.encode("image 20x2")
    assert ids == USER + [163602, *words, 163603, 163605, 163604] + END


def test_segments_are_encoded_apart(tokenizer):
    """E-15: parts that would make one token together do not join."""
    parts = [{"type": "text", "text": "thin"}, {"type": "text", "text": "king"}]
    ids = segments_ids(build_segments([{"role": "user", "content": parts}]), tokenizer)
    assert 130400 not in ids
    assert ids[7:9] == [317, 319]
