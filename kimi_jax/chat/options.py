"""The messages that the renderer adds: tools, thinking effort, tool choice, response format.

The sentences are part of the format: the model was trained on exactly these.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_jax.chat.errors import ChatError, wrong
from kimi_jax.chat.literals import sorted_json
from kimi_jax.chat.segments import Segment, SegmentWriter

EFFORTS = ("low", "high", "max")
BEHIND = ("tool choice", "response format")
"""The parts of the prompt that stand behind the messages: they are for one request."""
REQUEST_OPTIONS = ("tools", "thinking", "effort", "tool_choice", "response_format", "response_schema")
_ALIASES = {"thinking_effort": "effort", "reasoning_effort": "effort"}

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


def request_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `render` that stand beside the messages of an OpenAI-style request.

    Other keys, and keys without a value, are left out. `thinking_effort` and `reasoning_effort` are `effort`.

    **Raises:** `ChatError` for an option that is given twice, with two values.
    """
    options: dict[str, Any] = {}
    for key, value in request.items():
        name = _ALIASES.get(key, key)
        if name not in REQUEST_OPTIONS or value is None:
            continue
        if name in options and options[name] != value:
            raise ChatError(f"{name} is said twice, as {options[name]!r} and {value!r}")
        options[name] = value
    return options


def thinks(thinking: bool, effort: str | None) -> bool:
    """Whether the model thinks first, under these options of `render`: the output has to be read accordingly.

    **Returns:** `thinking`, but False for effort `none`.

    **Raises:** `ChatError` for an effort that K3 does not have.
    """
    if not isinstance(thinking, bool):
        raise wrong("thinking", thinking, "True or False")
    if effort is None or effort in EFFORTS:
        return thinking
    if effort == "none":
        return False
    if effort == "medium":
        raise ChatError(
            "effort: found 'medium', which K3's prompt mentions but the published encoder refuses: the model knows "
            "'low', 'high' and 'max'; use 'low' or 'high'"
        )
    raise wrong("effort", effort, "'low', 'high', 'max', 'none' (no thinking) or None (no effort message)")


def declare_tools(writer: SegmentWriter, tools: object, where: str, *, dynamic: bool = False) -> None:
    """Writes the message that declares tools; `dynamic` for tools added within the conversation."""
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise wrong(where, tools, "a list of tools")
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            wanted = 'a mapping like {"type": "function", "function": {"name": …, "parameters": …}}'
            raise wrong(f"{where}[{number}]", tool, wanted)
    introduction = _MORE_TOOLS if dynamic else _TOOLS
    _write(writer, "tool-declare", introduction + _fenced(sorted_json(list(tools), where)), "tools")


def tools_message(tools: object) -> list[Segment]:
    """The message that declares a conversation's tools; nothing without tools."""
    writer = SegmentWriter()
    if tools is not None:
        declare_tools(writer, tools, "tools")
    return writer.segments if tools else []


def effort_message(effort: str | None) -> list[Segment]:
    """The message that tells the thinking effort, one of `EFFORTS`; nothing for None."""
    writer = SegmentWriter()
    if effort is not None:
        _write(writer, "thinking-effort", _EFFORT.format(effort), "effort")
    return writer.segments


def tool_choice_message(tool_choice: str | Mapping[str, Any] | None) -> list[Segment]:
    """The message for tool choice `required` or `none`.

    Nothing for None, `auto` and a named function, `{"type": "function", "function": {"name": …}}`: that a certain
    tool is called can only be had by constraining what is sampled.
    """
    writer = SegmentWriter()
    if isinstance(tool_choice, str) and tool_choice in _TOOL_CHOICES:
        _write(writer, "tool-choice", _TOOL_CHOICES[tool_choice], "tool choice")
    elif isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise wrong("tool_choice", tool_choice, 'one like {"type": "function", "function": {"name": …}}')
    elif tool_choice not in (None, "auto"):
        raise wrong("tool_choice", tool_choice, "'auto', 'required', 'none' or a mapping that names a function")
    return writer.segments


def response_format_message(response_format: Mapping[str, Any] | None, response_schema: object) -> list[Segment]:
    """The message for a response format of type `json_object` or `json_schema`; nothing for None and `text`."""
    kind = None
    if response_format is not None:
        if not isinstance(response_format, Mapping):
            raise wrong("response_format", response_format, 'a mapping like {"type": "json_object"}')
        kind = response_format.get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise wrong("response_format.type", kind, "'text', 'json_object' or 'json_schema'")
    if response_schema is not None and kind != "json_schema":
        raise wrong("response_format", kind, "type 'json_schema', as a response_schema is given")
    writer = SegmentWriter()
    if response_format is not None and kind != "text":
        text = _RESPONSE_FORMAT.format(kind)
        if kind == "json_schema":
            schema = response_schema
            if schema is None:
                schema = _schema_within(response_format.get("json_schema"))
            text += _SCHEMA + _fenced(sorted_json(schema, "response_format: the schema"))
        _write(writer, "response-format", text, "response format")
    return writer.segments


def _schema_within(given: object) -> object:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise wrong("response_format.json_schema", given, "a mapping with the schema as `schema`")
    for key in ("schema", "json_schema"):
        if given.get(key) is not None:
            return given[key]
    return given


def _write(writer: SegmentWriter, kind: str, body: str, part: str) -> None:
    writer.open_message([("role", "system"), ("type", kind)], part)
    writer.text(body, part)
    writer.close_message(part)


def _fenced(text: str) -> str:
    return f"```json\n{text}\n```"
