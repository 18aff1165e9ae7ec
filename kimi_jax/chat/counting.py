"""What a conversation costs: tokens by message and part, and the calls of a whole agent run.

An agent calls the model once for each assistant message. Each call sends the whole conversation again: what the call
before sent or received is cached input, the rest new input. K3 wants earlier thinking sent back, so that it is paid for
as input in every later call. An image counts as the features that take the place of its `<|media_pad|>`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kimi_jax.chat.images import image_geometry
from kimi_jax.chat.options import BEHIND
from kimi_jax.chat.render import render
from kimi_jax.chat.segments import Segment, segments_ids
from kimi_jax.chat.tokenizer import Tokenizer

OPENER = 3
"""Tokens of the channel opener at the end of a prompt, which the API counts neither as input nor as output."""
MILLION = 1_000_000
_PROMPT = "generation prompt"


@dataclass(frozen=True)
class MessageCount:
    """Tokens of one message.

    - `message`: its index; None for a message that the renderer adds.
    - `role`: its role; of an added message the part, for instance "tools".
    - `parts`: tokens by part, see `kimi_jax.chat.segments.Segment`.
    """

    message: int | None
    role: str
    parts: Mapping[str, int]

    @property
    def tokens(self) -> int:
        """All its tokens."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Call:
    """One call of the model; in tokens.

    - `message`: index of the assistant message that it answers with; None for the answer still to come.
    - `cached`, `new`: input that the calls before have sent or received already, and the rest.
    - `output`: the answer. `thinking`: of the input, reasoning of earlier answers.
    - `behind`: of `new`, the options behind the messages, which come with each call and are not kept.
    - `once`: of `new`, what only a first call has: effort, tools and system messages.
    - `reasoning`: of the output, reasoning.
    """

    message: int | None
    cached: int
    new: int
    output: int
    thinking: int
    behind: int = 0
    once: int = 0
    reasoning: int = 0

    @property
    def input(self) -> int:
        """All input."""
        return self.cached + self.new


@dataclass(frozen=True)
class Prices:
    """Dollars a million tokens."""

    input: float = 2.0
    cached: float = 0.2
    output: float = 10.0

    def cost(self, call: Call) -> float:
        """Dollars of one call."""
        return (call.new * self.input + call.cached * self.cached + call.output * self.output) / MILLION

    def thinking(self, call: Call) -> float:
        """Dollars that earlier thinking adds to a call; sent before or written by the model, all of it is cached."""
        return call.thinking * self.cached / MILLION


def count_messages(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **options: Any
) -> tuple[MessageCount, ...]:
    """Tokens of each message of the prompt, in its order. `options` as `render` takes them."""
    return tuple(_count(messages, group, tokenizer) for group in _grouped(render(messages, **options)))


def count_calls(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **options: Any) -> tuple[Call, ...]:
    """The calls of an agent run: one for each assistant message, and one for what follows the last of another role.

    Options that stand behind the messages (tool choice, response format) are taken to be sent, new, with each call.
    """
    calls = calls_of(count_messages(messages, tokenizer, **(options | {"add_generation_prompt": True})))
    return tuple(call for call in calls if call.message is not None or options.get("add_generation_prompt", True))


def calls_of(groups: Sequence[MessageCount]) -> tuple[Call, ...]:
    """As `count_calls`, from the counts of a prompt that ends with the generation prompt."""
    given = [group.role for group in groups if group.message is not None]
    open_end = not given or given[-1] != "assistant"
    opener = sum(group.tokens for group in groups if group.role == _PROMPT)
    behind = sum(group.tokens for group in groups if group.role in BEHIND)
    calls: list[Call] = []
    sent, thinking, known, once = 0, 0, 0, 0
    for group in groups:
        if group.role == "assistant" or (group.role == _PROMPT and open_end):
            new = sent + opener - OPENER + behind - known
            reasoning = group.parts.get("reasoning", 0)
            first = 0 if calls else once
            calls.append(Call(group.message, known, new, group.tokens - opener, thinking, behind, first, reasoning))
            known = sent + group.tokens
            thinking += reasoning
        elif group.message is None or group.role == "system":
            once += group.tokens if group.role not in BEHIND else 0
        if group.role not in (*BEHIND, _PROMPT):
            sent += group.tokens
    return tuple(calls)


def further_calls(calls: Sequence[Call], count: int) -> tuple[Call, ...]:
    """`calls` and more like them, `count` in all: each adds the average output, reasoning and new input.

    New input is averaged over the calls after the first; of a single call it is the input without what comes once. An
    answer still to come is one of the calls, with the average output.

    **Raises:** `ValueError` where no call has an answer.
    """
    answered = [call for call in calls if call.message is not None]
    if not answered:
        raise ValueError("no answer to average over")
    output = round(sum(call.output for call in answered) / len(answered))
    reasoning = round(sum(call.reasoning for call in answered) / len(answered))
    later = calls[1:] or calls
    new = round(sum(call.new - call.once for call in later) / len(later))
    found = [
        call if call.message is not None else replace(call, output=output, reasoning=reasoning)
        for call in calls[:count]
    ]
    while len(found) < count:
        last = found[-1]
        held = last.input - last.behind + OPENER + last.output
        thinking = last.thinking + last.reasoning
        found.append(Call(None, held, new, output, thinking, last.behind, 0, reasoning))
    return tuple(found)


def _grouped(segments: Iterable[Segment]) -> list[list[Segment]]:
    """The segments of each message, the added ones by their part."""
    groups: list[list[Segment]] = []
    last: Any = object()
    for segment in segments:
        key = segment.message if segment.message is not None else segment.part
        if key != last:
            groups.append([])
            last = key
        groups[-1].append(segment)
    return groups


def _count(messages: Sequence[Mapping[str, Any]], group: Sequence[Segment], tokenizer: Tokenizer) -> MessageCount:
    parts: Counter[str] = Counter()
    for segment in group:
        parts[segment.part] += len(segments_ids([segment], tokenizer))
        if segment.part == "image":
            width, height = map(int, re.findall(r"\d+", segment.text))
            parts[segment.part] += image_geometry(width, height).features - 1
    first = group[0]
    role = first.part if first.message is None else str(messages[first.message].get("role"))
    return MessageCount(first.message, role, dict(parts))
