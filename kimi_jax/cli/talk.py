"""A conversation with a model and its tools, turn by turn: what `kimi-jax chat` keeps, without its screen."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_jax.chat.parser import Delta, OutputParser
from kimi_jax.chat.render import build_segments
from kimi_jax.chat.segments import segments_ids
from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.chat.tools import Tool, ToolError
from kimi_jax.inference.conversation import Conversation
from kimi_jax.inference.sampling import Sampling

DECLINED = "The user declined this call."


@dataclass(frozen=True)
class Reply:
    """How an answer went.

    - `tokens`: new ids, the stop id among them.
    - `rate`: of them a second, without the first two: a step may compile for them. None where there are no more.
    - `prefilled`: tokens of the prompt that were not in the cache; `prefill_seconds`: for these.
    - `context`: tokens of the conversation now.
    - `end`: "stop", "length" (no room, or as many as were allowed) or "interrupted".
    """

    tokens: int
    rate: float | None
    prefilled: int
    prefill_seconds: float
    context: int
    end: str


class Talk:
    """Messages, and the cache that holds their ids.

    As long as each answer ends as the format says, the ids that the model wrote stay as they are and only what is new
    is added: no token is prefilled twice. After an answer that was cut off the messages are written anew.
    """

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: Tokenizer,
        *,
        thinking: bool = True,
        effort: str | None = None,
        system: str | None = None,
        tools: Sequence[Tool] = (),
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        self.conversation, self.tokenizer = conversation, tokenizer
        self.tools = {tool.name: tool for tool in tools}
        self.thinking, self.max_new_tokens = thinking, max_new_tokens
        self.options: dict[str, Any] = {"thinking": thinking, "effort": effort if thinking else None}
        self.options["tools"] = [tool.declaration for tool in tools] or None
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.stop_ids = (tokenizer.end_of_msg_id, tokenizer.eos_id)
        self._sampling = sampling or Sampling()
        self._written: tuple[list[int], int] = [], 0
        """Ids of the conversation as they were, and how many messages they are."""
        self._before = self._written

    def say(self, text: str) -> None:
        """Adds what the user says."""
        self._before = self._written
        self.messages.append({"role": "user", "content": text})

    def take_back(self) -> bool:
        """Forgets what followed the user's last message, and draws with the next seed; False where there is none."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if last is None:
            return False
        del self.messages[last + 1 :]
        self._written = self._before
        self._sampling = replace(self._sampling, seed=(self._sampling.seed + 1) % 2**32)
        self.conversation.draw_by(self._sampling)
        return True

    def reply(self, on_delta: Callable[[Delta], None]) -> Reply:
        """Lets the model answer; its message is added, unless no token came. Ctrl-C ends the answer, not the program.

        **Raises:** `ChatError` for messages that cannot be written, `ContextFullError` where they leave no room; then
        nothing was added.
        """
        prompt = self._prompt()
        parser = OutputParser(self.tokenizer, thinking=self.thinking, first_call=self._calls())
        new: list[int] = []
        times: list[float] = []
        end = "length"
        try:
            for token in self.conversation.answer(prompt, self.stop_ids, self.max_new_tokens):
                times.append(time.perf_counter())
                new.append(token)
                for delta in parser.push(token):
                    on_delta(delta)
                if parser.finished:  # perhaps by a message that is not the model's own
                    break
            end = "stop" if parser.finished else "length"
        except KeyboardInterrupt:
            end = "interrupted"
        for delta in parser.finish():
            on_delta(delta)
        rate = (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None
        message = dict(parser.message)
        if not parser.complete:  # a call that nobody ends is not made
            message.pop("tool_calls", None)
        if new:
            self.messages.append(message)
            whole = parser.complete and new[-1] == self.tokenizer.end_of_msg_id
            self._written = (prompt + new, len(self.messages)) if whole else ([], 0)
        talk = self.conversation
        return Reply(len(new), rate, talk.prefilled, talk.prefill_seconds, len(prompt) + len(new), end)

    def pending(self) -> list[dict[str, Any]]:
        """Tool calls of the last message."""
        return list(self.messages[-1].get("tool_calls") or ()) if self.messages else []

    def use_tool(self, call: dict[str, Any], allowed: bool) -> str:
        """Makes a call where the user allows it, and adds its result, or what went wrong, for the model to read."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not allowed:
            result = DECLINED
        elif name not in self.tools:
            result = f"Error: there is no tool {name!r}."
        else:
            try:
                result = self.tools[name].call(arguments)
            except ToolError as error:
                result = f"Error: {error}"
            except Exception as error:  # the user's function
                result = f"Error: {type(error).__name__}: {error}"
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return result

    def save(self, path: Path) -> None:
        """Writes the messages and the options to a JSON file, which `kimi-jax tokens` reads too."""
        kept = {name: value for name, value in self.options.items() if value is not None}
        text = json.dumps({"messages": self.messages, **kept}, ensure_ascii=False, indent=1)
        path.write_text(text + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Goes on with the messages of a file that `save` wrote. **Raises:** `ValueError` naming what is wrong."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except RecursionError:
            raise ValueError(f"{path}: nested too deep") from None
        messages = found.get("messages") if isinstance(found, dict) else found
        if not isinstance(messages, list):
            raise ValueError(f"{path}: wanted an object with a list of messages")
        build_segments(messages, **self.options)
        self.messages = [dict(message) for message in messages]
        self._written = self._before = [], 0

    def _prompt(self) -> list[int]:
        segments = build_segments(self.messages, **self.options)
        ids, count = self._written
        if count:
            segments = [
                segment
                for segment in segments
                if segment.part == "generation prompt" or (segment.message is not None and segment.message >= count)
            ]
        return ids + segments_ids(segments, self.tokenizer)

    def _calls(self) -> int:
        return sum(len(message.get("tool_calls") or ()) for message in self.messages)
