"""A conversation with a model and its tools, turn by turn: what `kimi-jax chat` keeps, without its screen."""

import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_jax.chat.parser import Delta, OutputParser
from kimi_jax.chat.render import build_segments
from kimi_jax.chat.segments import segments_ids, valid_unicode
from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.chat.tools import Tool, ToolError
from kimi_jax.inference.conversation import Conversation
from kimi_jax.inference.sampling import Sampling

DECLINED = "The user declined this call."
STOPPED = "Error: the user interrupted this call."


@dataclass(frozen=True)
class Reply:
    """How an answer went.

    - `tokens`: new ids, the stop id among them.
    - `rate`: of them a second, without the first two: a step may compile for them. None where there are no more.
    - `prefilled`: tokens of the prompt that were not in the cache; `prefill_seconds`: for these.
    - `context`: tokens of the conversation now.
    - `end`: "" where the model ended it, otherwise why it stopped.
    - `cut_calls`: tool calls that were not whole when it stopped, and are not made.
    """

    tokens: int
    rate: float | None
    prefilled: int
    prefill_seconds: float
    context: int
    end: str
    cut_calls: int


class Talk:
    """Messages, and the cache that holds their ids.

    As long as each answer ends as the format says, the ids that the model wrote stay as they are and only what is new
    is added: no token is prefilled twice. An answer that was cut off is written anew, as its text.
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

    def take_back_all(self) -> None:
        """Forgets the user's last message and what followed it, as if it had not been said."""
        last = max(i for i, message in enumerate(self.messages) if message["role"] == "user")
        del self.messages[last:]
        self._written = self._before

    def reply(self, on_delta: Callable[[Delta], None]) -> Reply:
        """Lets the model answer; its message is added, unless no token came. Ctrl-C ends the answer, not the program.

        **Raises:** `ChatError` for messages that cannot be written, `ContextFullError` where they leave no room; then
        nothing was added.
        """
        prompt = self._prompt()
        parser = OutputParser(self.tokenizer, thinking=self.thinking, first_call=self._calls())
        new: list[int] = []
        times: list[float] = []
        end = "there is no room for more"
        try:
            for token in self.conversation.answer(prompt, self.stop_ids, self.max_new_tokens):
                times.append(time.perf_counter())
                new.append(token)
                for delta in parser.push(token):
                    on_delta(delta)
                if parser.finished:  # perhaps by a message that is not the model's own
                    end = ""
                    break
                if len(new) == self.max_new_tokens:
                    end = "as many tokens as an answer may have"
        except KeyboardInterrupt:
            end = "interrupted"
        except FloatingPointError as error:
            end = str(error)
        for delta in parser.finish():
            on_delta(delta)
        rate = (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None
        message, cut = dict(parser.message), 0
        if end or not parser.calls_closed:  # a call that nobody ends is not made
            cut = len(message.pop("tool_calls", ()))
        if new:
            self.messages.append(message)
            if parser.complete and new[-1] == self.tokenizer.end_of_msg_id:
                self._written = prompt + new, len(self.messages)
        talk = self.conversation
        return Reply(len(new), rate, talk.prefilled, talk.prefill_seconds, len(prompt) + len(new), end, cut)

    def pending(self) -> list[dict[str, Any]]:
        """Tool calls of the last message."""
        return list(self.messages[-1].get("tool_calls") or ()) if self.messages else []

    def use_tool(self, call: dict[str, Any], allowed: bool) -> str:
        """Makes a call where the user allows it, and adds its result, or what went wrong, for the model to read.

        Nothing that the function does ends the program, Ctrl-C included: then the result is `STOPPED`.
        """
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name not in self.tools:
            result = f"Error: there is no tool {name!r}."
        elif not allowed:
            result = DECLINED
        else:
            try:
                result = self.tools[name].call(arguments)
            except ToolError as error:
                result = f"Error: {error}"
            except KeyboardInterrupt:
                result = STOPPED
            except (Exception, SystemExit) as error:  # the user's function
                result = f"Error: {traceback.format_exception_only(error)[-1].strip()}"
        result = valid_unicode(result)
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return result

    def save(self, path: Path) -> None:
        """Writes the messages and the options to a JSON file, which `kimi-jax tokens` reads too.

        A file that was there is replaced when the new one is whole.
        """
        kept = {name: value for name, value in self.options.items() if value is not None}
        text = json.dumps({"messages": self.messages, **kept}, ensure_ascii=False, indent=1)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            beside.write_text(valid_unicode(text) + "\n", encoding="utf-8")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def load(self, path: Path) -> list[str]:
        """Goes on with the messages of a file that `save` wrote, under the options of this conversation.

        **Returns:** the names of options that are others in the file.

        **Raises:** `ValueError` naming what is wrong; then nothing changed.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8-sig"))
        except RecursionError:
            raise ValueError(f"{path}: nested too deep") from None
        found = {"messages": found, **self.options} if isinstance(found, list) else found
        messages = found.get("messages") if isinstance(found, dict) else None
        if not isinstance(messages, list):
            raise ValueError(f"{path}: wanted an object with a list of messages")
        build_segments(messages, **self.options)
        self.messages = [dict(message) for message in messages]
        self._written = self._before = [], 0
        return [name for name, value in self.options.items() if found.get(name) != value]

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
