"""What a generated message consists of, in the pieces that a client gets while it is generated."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from kimi_jax.chat.arguments import ArgumentsWriter


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; `index` counts the message's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the arguments of call `index`."""

    index: int
    text: str


Delta: TypeAlias = ReasoningDelta | ContentDelta | CallStart | CallArguments


class MessageBuilder:
    """Turns additions to one message into deltas, of which none is empty, and keeps their sum.

    `first_call` is the number of tool calls earlier in the conversation, from which ids go on.
    """

    def __init__(self, first_call: int) -> None:
        self.arguments = ArgumentsWriter()
        self._first_call = first_call
        self._reasoning: list[str] = []
        self._think_start = 0
        self._content: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []
        self._deltas: list[Delta] = []

    def take_deltas(self) -> list[Delta]:
        """The deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def begin_reasoning(self) -> None:
        """Marks the start of a think channel."""
        self._think_start = len(self._reasoning)

    def add_reasoning(self, text: str) -> None:
        """Adds to the reasoning."""
        if text:
            self._reasoning.append(text)
            self._deltas.append(ReasoningDelta(text))

    def add_content(self, text: str) -> None:
        """Adds to the answer."""
        if text:
            self._content.append(text)
            self._deltas.append(ContentDelta(text))

    def answer_with_reasoning(self) -> None:
        """Adds the text of the last think channel to the answer too."""
        self.add_content("".join(self._reasoning[self._think_start :]))

    def begin_call(self, name: str) -> None:
        """Adds a call, whose arguments `arguments` now writes."""
        number = len(self._calls)
        call = CallStart(number, f"{name}:{self._first_call + number}", name)
        self._calls.append((call, []))
        self._deltas.append(call)
        self.arguments = ArgumentsWriter()

    def add_arguments(self, text: str) -> None:
        """Adds JSON text to the last call's arguments."""
        if text:
            call, arguments = self._calls[-1]
            arguments.append(text)
            self._deltas.append(CallArguments(call.index, text))

    def message(self) -> dict[str, Any]:
        """All deltas joined, as an assistant message of OpenAI's interface."""
        message: dict[str, Any] = {"role": "assistant"}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        message["content"] = "".join(self._content)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(arguments)},
                }
                for call, arguments in self._calls
            ]
        return message
