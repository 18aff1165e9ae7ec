"""Conversations as prompts: messages in the OpenAI form become the segments that K3 was trained on.

The order is: tools, thinking effort, the messages, tool choice, response format, and the opening of the answer.
What is for the whole conversation comes first and what is for one request last, so that the next request shares
as long a prefix as possible.

    segments = render(messages, tools=tools)
    ids = segments_ids(segments, tokenizer)

The format is that of the second published revision of the encoder (2026-08-20).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kimi_jax.chat.errors import ChatError, wrong
from kimi_jax.chat.images import IMAGE_PART_TYPES, placeholder_of_part
from kimi_jax.chat.literals import Argument, arguments_from_mapping, arguments_from_text
from kimi_jax.chat.options import (
    declare_tools,
    effort_message,
    response_format_message,
    thinks,
    tool_choice_message,
    tools_message,
)
from kimi_jax.chat.results import Call, calls_of, optional_text, ordered_results
from kimi_jax.chat.segments import Segment, SegmentWriter, segments_ids, segments_text

__all__ = ["ChatError", "Segment", "build_segments", "render", "segments_ids", "segments_text", "thinks"]

_ROLES = ("system", "user", "assistant", "tool")
_ROLE_HINTS = {"developer": "system", "function": "tool"}


def render(
    messages: Iterable[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = "max",
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    response_schema: object = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Renders a conversation as K3 is served: with a thinking effort of `max` unless told otherwise.

    For the arguments and all else see `build_segments`.
    """
    return build_segments(
        messages,
        tools=tools,
        thinking=thinking,
        effort=effort,
        tool_choice=tool_choice,
        response_format=response_format,
        response_schema=response_schema,
        add_generation_prompt=add_generation_prompt,
    )


def build_segments(
    messages: Iterable[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    response_schema: object = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Renders a conversation; without `effort` no thinking effort is named.

    **Messages** have a `role`:

    - `user`, `system`, `assistant`: `content` is a text, None, or a list of parts `{"type": "text", "text": …}` and
      `{"type": "image", "width": …, "height": …}` (see `kimi_jax.chat.images`). A `name` is shown to the model.
    - `assistant` besides: `reasoning_content`, or `reasoning`, is what the model thought. Send it back: K3 expects all
      of its earlier thinking, and a missing one is rendered as empty. `tool_calls` is a list of
      `{"id": …, "function": {"name": …, "arguments": …}}` with arguments as JSON text or as a mapping; text that is
      not a JSON object is shown to the model as it is.
    - `tool`: the result of a call, named by `tool_call_id`. Results are put into the order of the calls.
    - `system` with `tools` adds those tools from there on; its content is not rendered.

    Other keys are ignored. Special tokens spelled in any text are plain text, and so is the text of an image's
    placeholder. Lone surrogates become U+FFFD. The caller's objects are not changed.

    **Arguments:**

    - `messages`: the conversation.
    - `tools`: tools in the OpenAI form, `{"type": "function", "function": {…}}`.
    - `thinking`: False for instruct mode: the answer begins without thinking, and thinking in `messages` is left out.
    - `effort`: `low`, `high` or `max`; `none` is the same as `thinking=False`; None names no effort. Ignored in
      instruct mode.
    - `tool_choice`: `auto`, `required`, `none`, or a mapping that names a function, which the prompt does not show.
    - `response_format`: `{"type": …}` with `text`, `json_object` or `json_schema`.
    - `response_schema`: goes before the schema in `response_format`.
    - `add_generation_prompt`: whether to open the answer. The output is then read from inside the thinking, or from
      inside the response in instruct mode; `thinks(thinking, effort)` says which.

    **Returns:** the segments; `segments_ids` encodes them.

    **Raises:** `ChatError` for a message, tool or option that cannot be rendered.
    """
    thinking = thinks(thinking, effort)
    conversation = _checked_messages(messages)
    segments = tools_message(tools)
    if thinking:
        segments += effort_message(effort)
    segments += _conversation(conversation, thinking)
    segments += tool_choice_message(tool_choice)
    segments += response_format_message(response_format, response_schema)
    if add_generation_prompt:
        writer = SegmentWriter()
        writer.open_message([("role", "assistant")], "generation prompt")
        writer.open("think" if thinking else "response", part="generation prompt")
        segments += writer.segments
    return segments


def _checked_messages(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise wrong("messages", messages, "a list of messages")
    conversation = list(messages)
    for index, message in enumerate(conversation):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise wrong(where, message, "a mapping with `role` and `content`")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            hint = _ROLE_HINTS.get(role) if isinstance(role, str) else None
            wanted = f"'{hint}', which takes its place" if hint else "'system', 'user', 'assistant' or 'tool'"
            raise wrong(f"{where}.role", role, wanted)
        for field, owner in (("tools", "system"), ("tool_calls", "assistant")):
            if message.get(field) and role != owner:
                raise ChatError(f"{where}.{field}: found in a message of role '{role}', wanted only in '{owner}'")
    return conversation


def _conversation(messages: Sequence[Mapping[str, Any]], thinking: bool) -> list[Segment]:
    segments: list[Segment] = []
    calls: list[Call] = []
    results = 0
    index = 0
    while index < len(messages):
        message = messages[index]
        if message["role"] == "tool":
            run = []
            while index < len(messages) and messages[index]["role"] == "tool":
                run.append((index, messages[index]))
                index += 1
            for place, tool in ordered_results(run, calls, results + 1):
                results += 1
                segments += _tool_result(place, messages[place], tool, results)
            continue
        if message["role"] == "assistant":
            calls = calls_of(message, f"messages[{index}]")
            results = 0
            segments += _assistant(index, message, calls, thinking)
        elif message.get("tools"):
            writer = SegmentWriter(index)
            declare_tools(writer, message["tools"], f"messages[{index}].tools", dynamic=True)
            segments += writer.segments
        else:
            writer = SegmentWriter(index)
            writer.open_message(_role_and_name(index, message))
            _write_content(writer, index, message, "content")
            writer.close_message()
            segments += writer.segments
        index += 1
    return segments


def _role_and_name(index: int, message: Mapping[str, Any]) -> list[tuple[str, str]]:
    name = optional_text(message.get("name"), f"messages[{index}].name")
    return [("role", message["role"])] + ([("name", name)] if name else [])


def _write_content(writer: SegmentWriter, index: int, message: Mapping[str, Any], part_name: str) -> None:
    content = message.get("content")
    where = f"messages[{index}].content"
    if content is None:
        return
    if isinstance(content, str):
        writer.text(content, part_name)
        return
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise wrong(where, content, "a string, a list of parts or None")
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise wrong(f"{place}.text", part.get("text"), "a string")
            writer.text(part["text"], part_name)
        elif kind in IMAGE_PART_TYPES:
            writer.structural(placeholder_of_part(part, place), "image")
        elif isinstance(part, Mapping):
            raise wrong(f"{place}.type", kind, "'text', 'image' or 'image_url'; K3 takes no other kinds")
        else:
            raise wrong(place, part, 'a mapping like {"type": "text", "text": …}')


def _tool_result(index: int, message: Mapping[str, Any], tool: str, number: int) -> list[Segment]:
    writer = SegmentWriter(index)
    writer.open_message([("role", "tool"), ("tool", tool), ("index", str(number))])
    _write_content(writer, index, message, "tool result")
    writer.close_message()
    return writer.segments


def _assistant(index: int, message: Mapping[str, Any], calls: Sequence[Call], thinking: bool) -> list[Segment]:
    where = f"messages[{index}]"
    writer = SegmentWriter(index)
    writer.open_message(_role_and_name(index, message))
    if thinking:
        reasoning = optional_text(message.get("reasoning_content"), f"{where}.reasoning_content")
        writer.open("think")
        writer.text(reasoning or optional_text(message.get("reasoning"), f"{where}.reasoning") or "", "reasoning")
        writer.close("think")
    writer.open("response")
    _write_content(writer, index, message, "content")
    writer.close("response")
    if calls:
        writer.open("tools", part="tool calls")
        for number, call in enumerate(calls):
            writer.open("call", [("tool", call.name), ("index", str(number + 1))], "tool calls")
            arguments = message["tool_calls"][number]["function"].get("arguments")
            _write_arguments(writer, arguments, f"{where}.tool_calls[{number}].function.arguments")
            writer.close("call", "tool calls")
        writer.close("tools", "tool calls")
    writer.close_message()
    return writer.segments


def _write_arguments(writer: SegmentWriter, given: object, where: str) -> None:
    members: Sequence[Argument] = ()
    if isinstance(given, Mapping):
        members = arguments_from_mapping(given, where)
    elif isinstance(given, str):
        read = arguments_from_text(given, where)
        if read is None:
            writer.open("json", [("type", "object")], "tool calls")
            writer.text(given, "tool calls")
            writer.close("json", "tool calls")
            return
        members = read
    elif given is not None:
        raise wrong(where, given, "JSON text, a mapping or None")
    for key, kind, text in members:
        writer.open("argument", [("key", key), ("type", kind)], "tool calls")
        writer.text(text, "tool calls")
        writer.close("argument", "tool calls")
