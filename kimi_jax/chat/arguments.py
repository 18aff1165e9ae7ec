"""The arguments of one tool call as JSON text, written while the model still generates them.

K3 writes an argument as an element with a key, a type and a body: the bare text of a string, the JSON text of
anything else. Clients expect one JSON object, in pieces that can be sent on at once.
"""

import json
import re

# Python's reader has a limit that depends on its stack, and 128 is a common one.
_MAX_DEPTH = 100
_MAX_DIGITS = 4300  # Python's limit
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]')

# Only strings are given to it, for which it is the C function that escapes them, and surrogates do not occur.
_quote = json.JSONEncoder(ensure_ascii=False).encode


class ArgumentsWriter:
    """Writes one call's arguments; what its methods return, joined up to `close`, is a JSON object.

    - A value of type `string` is escaped and returned as it comes.
    - A value of any other type, or of none, is kept until its end. It then stands byte for byte as it is if it
        is JSON, whether or not of the type that was said. Otherwise (`12abc`, `True`, `{`, `NaN`, nothing at
        all) its text becomes a JSON string, and so does JSON that common readers refuse: more than 100 levels
        deep, or with a whole number of over 4,300 digits.
    - Keys that come again are all written, in order. Readers of JSON take the last one.
    - A raw block that is a JSON object adds its members, byte for byte. Any other adds its text as a string
        with the key `json`.
    """

    def __init__(self) -> None:
        self._empty = True
        self._streams = False
        self._raw = False
        self._pieces: list[str] = []

    def begin(self, key: str, value_type: str | None) -> str:
        """Starts an argument.

        **Arguments:**

        - `key`: its name.
        - `value_type`: its type as the model wrote it; None if it wrote none.

        **Returns:** the JSON text that is certain now, as do the other methods.
        """
        self._streams = value_type == "string"
        return self._member(f'{_quote(key)}: "' if self._streams else f"{_quote(key)}: ")

    def begin_raw(self) -> None:
        """Starts a raw block, which stands in place of all arguments."""
        self._raw = True

    def add(self, text: str) -> str:
        """Takes the next part of a value or of a raw block."""
        if self._streams:
            return _quote(text)[1:-1]
        self._pieces.append(text)
        return ""

    def end(self) -> str:
        """Ends the value or the raw block."""
        streamed, self._streams = self._streams, False
        raw, self._raw = self._raw, False
        text = "".join(self._pieces)
        self._pieces.clear()
        if streamed:
            return '"'
        if not raw:
            return text if _is_json(text) else _quote(text)
        members = text.strip(" \t\n\r")
        if not (members.startswith("{") and _is_json(members)):
            return self._member(f'"json": {_quote(text)}')
        members = members[1:-1]
        return self._member(members) if members.strip() else ""

    def close(self) -> str:
        """Ends the object, between two values."""
        return "{}" if self._empty else "}"

    def _member(self, text: str) -> str:
        lead, self._empty = "{" if self._empty else ", ", False
        return lead + text


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=_check_digits, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return text.count("[") + text.count("{") <= _MAX_DEPTH or _depth(text) <= _MAX_DEPTH


def _depth(text: str) -> int:
    depth = deepest = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        if found[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in "]}":
            depth -= 1
    return deepest


def _check_digits(number: str) -> None:
    if len(number) > _MAX_DIGITS:
        raise ValueError("a number that Python would not read")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
