"""Tokens by message and part, and the calls of a run: by hand, in a vocabulary where each byte is a token."""

import dataclasses

import pytest

from kimi_jax.chat.counting import Call, Prices, count_calls, count_messages, further_calls
from kimi_jax.chat.tokenizer import Tokenizer

OPENING = 1 + len("message") + len(' role="') + len('"') + 1
"""Of a message's header, without its role."""
CLOSING = 1 + len("message") + 1 + 1
THINK, RESPONSE = 1 + len("think") + 1, 1 + len("response") + 1
"""Of an opening or a closing tag."""


@pytest.fixture(scope="module")
def tokenizer():
    names = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
    names += [f"<|media_{name}|>" for name in ("begin", "content", "pad", "end")]
    return Tokenizer({bytes([i]): i for i in range(256)}, {name: 256 + i for i, name in enumerate(names)})


MESSAGES = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "reasoning_content": "xyz", "content": "c"},
    {"role": "user", "content": "defg"},
    {"role": "assistant", "reasoning_content": "w", "content": ""},
]
USER = OPENING + len("user") + CLOSING
ASSISTANT = OPENING + len("assistant") + CLOSING + 2 * THINK + 2 * RESPONSE


def test_by_message_and_part(tokenizer):
    counts = count_messages(MESSAGES, tokenizer, effort=None, add_generation_prompt=False)
    assert [(count.message, count.role, count.parts, count.tokens) for count in counts] == [
        (0, "user", {"markup": USER, "content": 2}, USER + 2),
        (1, "assistant", {"markup": ASSISTANT, "reasoning": 3, "content": 1}, ASSISTANT + 4),
        (2, "user", {"markup": USER, "content": 4}, USER + 4),
        (3, "assistant", {"markup": ASSISTANT, "reasoning": 1}, ASSISTANT + 1),
    ]


def test_an_image_counts_as_its_features(tokenizer):
    image = {"type": "image", "width": 4000, "height": 3000}
    (count,) = count_messages(
        [{"role": "user", "content": [{"type": "text", "text": "see "}, image]}],
        tokenizer,
        effort=None,
        add_generation_prompt=False,
    )
    assert count.parts["content"] == 4
    # 3 markers beside the pad, and the bytes of "image 4000x3000".
    assert count.parts["image"] == 15_444 + 3 + len("image 4000x3000")


def test_what_the_renderer_adds(tokenizer):
    counts = count_messages(MESSAGES[:1], tokenizer, tool_choice="none")
    assert [(count.message, count.role) for count in counts] == [
        (None, "effort"),
        (0, "user"),
        (None, "tool choice"),
        (None, "generation prompt"),
    ]
    assert counts[-1].tokens == OPENING + len("assistant") + THINK


def test_calls_of_a_run(tokenizer):
    """An answer begins behind the opener of its first channel, three tokens that the API does not count."""
    calls = count_calls(MESSAGES, tokenizer, effort=None)
    prompt = OPENING + len("assistant") + THINK
    first = USER + 2 + prompt - 3
    said = USER + 2 + ASSISTANT + 4
    assert calls == (
        Call(1, 0, first, ASSISTANT + 4 - prompt, 0, reasoning=3),
        Call(3, said, USER + 4 + prompt - 3, ASSISTANT + 1 - prompt, 3, reasoning=1),
    )
    (_, _, third) = count_calls([*MESSAGES, {"role": "user", "content": "h"}], tokenizer, effort=None)
    known = said + USER + 4 + ASSISTANT + 1
    assert third == Call(None, known, USER + 1 + prompt - 3, 0, 4)
    more = [*MESSAGES, {"role": "user", "content": "h"}]
    assert count_calls(more, tokenizer, effort=None, add_generation_prompt=False) == calls


def test_options_behind_the_messages_are_new_with_each_call(tokenizer):
    plain = count_calls(MESSAGES, tokenizer)
    forced = count_calls(MESSAGES, tokenizer, tool_choice="required")
    option = next(c for c in count_messages(MESSAGES, tokenizer, tool_choice="required") if c.role == "tool choice")
    behind = option.tokens
    assert forced == tuple(dataclasses.replace(call, new=call.new + behind, behind=behind) for call in plain)


def test_what_comes_once(tokenizer):
    """Effort, tools and system messages are not what a turn adds."""
    system = {"role": "system", "content": "abc"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    counts = count_messages([system, *MESSAGES], tokenizer, tools=tools)
    assert [count.role for count in counts[:4]] == ["tools", "effort", "system", "user"]
    once = sum(count.tokens for count in counts[:3])
    calls = count_calls([system, *MESSAGES], tokenizer, tools=tools)
    assert [call.once for call in calls] == [once, 0]
    assert calls[0].new - once == count_calls(MESSAGES, tokenizer, effort=None)[0].new


def test_prices():
    call = Call(1, cached=400_000, new=30_000, output=2_000, thinking=100_000)
    assert Prices().cost(call) == pytest.approx(0.08 + 0.06 + 0.02)
    assert Prices().thinking(call) == pytest.approx(0.02)
    assert Prices(1, 1, 0).cost(call) == pytest.approx(0.43)


def test_further_calls():
    calls = (
        Call(1, 0, 100, 20, 0, behind=7, once=70, reasoning=15),
        Call(3, 116, 40, 30, 15, behind=7, reasoning=20),
        Call(None, 182, 60, 0, 35, behind=7),
    )
    more = further_calls(calls, 5)
    assert more[:2] == calls[:2]
    assert more[2] == dataclasses.replace(calls[2], output=25, reasoning=18)
    assert more[3] == Call(None, 182 + 60 - 7 + 3 + 25, 50, 25, 35 + 18, behind=7, reasoning=18)
    assert more[4].cached == more[3].input - 7 + 3 + 25
    assert more[4].thinking == 35 + 18 + 18
    assert further_calls(calls, 1) == calls[:1]


@pytest.mark.parametrize("calls", [(), (Call(None, 0, 10, 0, 0),)])
def test_without_an_answer_there_is_no_average(calls):
    with pytest.raises(ValueError, match="no answer to average over"):
        further_calls(calls, 3)


@pytest.mark.parametrize("written", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"thinking": False}, {"tool_choice": "required", "response_format": {"type": "json_object"}}],
    ids=["plain", "instruct", "behind"],
)
def test_further_calls_are_those_of_the_exchange_written_out(tokenizer, written, options):
    system = [{"role": "system", "content": "a long instruction that comes once"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    exchange = [
        {"role": "user", "content": "what?"},
        {"role": "assistant", "reasoning_content": "hm, let me see", "content": "that"},
    ]

    def calls(times):
        return count_calls(system + times * exchange, tokenizer, tools=tools, **options)

    def numbers(found):
        return [(call.cached, call.new, call.output, call.thinking) for call in found]

    assert numbers(further_calls(calls(written), 6)) == numbers(calls(6))
