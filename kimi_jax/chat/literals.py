"""JSON in prompts: the arguments of tool calls, and declarations with sorted keys.

Arguments are shown to the model one by one, each with its key, its type and its value: strings as raw text,
everything else as JSON text. Where the caller sends arguments as a JSON string, as the OpenAI interface has it, the
JSON text of a value is kept as it was written: `1e2` stays `1e2`, and `[1,2]` gets no space.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kimi_jax.chat.errors import ChatError, wrong

# Numbers are wanted as written, and int() refuses some thousands of digits.
_DECODER = json.JSONDecoder(strict=False, parse_int=str, parse_float=str, parse_constant=str)
_OPENING = re.compile(r"[ \t\n\r]*\{[ \t\n\r]*")
_PLAIN_KEY = re.compile(r'"([^"\\]*)"')
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_SEPARATOR = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")
_TYPES = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


class Argument(NamedTuple):
    """One argument of a call: its key, the type named in the prompt, and the text of the value."""

    key: str
    type: str
    text: str


def arguments_from_text(source: str, where: str) -> list[Argument] | None:
    """Reads the arguments out of a JSON object's source text, one level deep.

    Repeated keys all count, and text after the closing brace is ignored. Control characters inside strings, `NaN`
    and `Infinity` are accepted. The published encoder does the same since its second revision.

    **Arguments:**

    - `source`: the text.
    - `where`: its place, for errors.

    **Returns:** the arguments in their order, none for the empty text; None if the text is no JSON object.

    **Raises:** `ChatError` if it is nested too deeply to be read.
    """
    if not source:
        return []
    try:
        return _members(source)
    except json.JSONDecodeError:
        return None
    except RecursionError:
        raise ChatError(f"{where}: this JSON is nested too deeply") from None


def arguments_from_mapping(arguments: Mapping[Any, Any], where: str) -> list[Argument]:
    """The arguments of a mapping; values that are not strings are written with `, ` and `: ` between items.

    **Arguments:**

    - `arguments`: values by key.
    - `where`: its place, for errors.

    **Returns:** the arguments in the mapping's order.

    **Raises:** `ChatError` for a key that is not a string or a value that JSON does not have.
    """
    members = []
    for key, value in arguments.items():
        if not isinstance(key, str):
            raise wrong(f"{where}: a key", key, "a string")
        place = f"{where}[{key[:60]!r}]"
        text = value if isinstance(value, str) else _dumped(value, place, sort_keys=False, separators=(", ", ": "))
        members.append(Argument(key, _type_name(value, place), text))
    return members


def sorted_json(value: object, where: str) -> str:
    """JSON text as in declarations: keys sorted at every depth, no spaces, other scripts unescaped.

    **Raises:** `ChatError` for a value that JSON does not have, that contains itself, or is nested too deeply.
    """
    return _dumped(value, where, sort_keys=True, separators=(",", ":"))


def _members(source: str) -> list[Argument] | None:
    opening = _OPENING.match(source)
    if opening is None:
        return None
    at = opening.end()
    members: list[Argument] = []
    if source[at : at + 1] == "}":
        return members
    while source[at : at + 1] == '"':
        plain = _PLAIN_KEY.match(source, at)
        key, at = (plain[1], plain.end()) if plain else _DECODER.raw_decode(source, at)
        colon = _COLON.match(source, at)
        if colon is None:
            return None
        start = colon.end()
        value, end = _DECODER.raw_decode(source, start)
        kind = _TYPES.get(source[start], "number")
        members.append(Argument(key, kind, value if kind == "string" else source[start:end]))
        separator = _SEPARATOR.match(source, end)
        if separator is None:
            return None
        if separator[1] == "}":
            return members
        at = separator.end()
    return None


def _type_name(value: object, where: str) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    if isinstance(value, Mapping):
        return "object"
    if isinstance(value, (list, tuple)):
        return "array"
    raise wrong(where, value, "a value that JSON has")


def _dumped(value: object, where: str, *, sort_keys: bool, separators: tuple[str, str]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=sort_keys, separators=separators, default=_plain_mapping)
    except RecursionError:
        raise ChatError(f"{where}: this value is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ChatError(f"{where}: cannot be written as JSON: {error}") from None


def _plain_mapping(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"values of type {type(value).__name__} are not JSON's")
