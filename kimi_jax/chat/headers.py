"""Reads the header of a generated tag: what follows `<|open|>` or `<|close|>`, up to `<|sep|>`."""

import re

from kimi_jax.chat.segments import CLOSE, OPEN

# How deep an element lies: the opening of one ends all that are as deep or deeper.
DEPTH = {"message": 0, "think": 1, "response": 1, "tools": 1, "call": 2, "argument": 3, "json": 3}

LONGEST_CUT = 256
"""Characters of a header that may be dropped where the output ends in it; a longer one is text."""

_WITH_ATTRIBUTES = ("message", "call", "argument", "json")
_NAME = re.compile(r"[a-z0-9_-]*")
_ATTRIBUTE = re.compile(r' ([^\s="]+)="([^"]*)"')
_CUT_ATTRIBUTE = re.compile(r'( [^\s="]*=?| [^\s="]+="[^"]*)?')


class Header:
    """The header of an opening or closing tag, from its control token on.

    `tag` is the element's name once other text follows it, "" before and for an unknown one.
    """

    def __init__(self, *, opening: bool) -> None:
        self.opening = opening
        self.tag = ""
        self._pieces: list[str] = []

    def add(self, text: str) -> bool:
        """Takes the next part; False as soon as it is certain that the header ended before or is none."""
        self._pieces.append(text)
        if self.tag:
            return True
        text = self.text
        name = _leading_name(text)
        if name == text and any(tag.startswith(name) for tag in DEPTH):
            return True
        if name in DEPTH:
            self.tag = name
        return self.has_attributes and text.startswith(" ", len(name))

    @property
    def has_attributes(self) -> bool:
        """Whether the tag is one that attributes may follow."""
        return self.opening and self.tag in _WITH_ATTRIBUTES

    @property
    def text(self) -> str:
        """The header as it was generated."""
        return "".join(self._pieces)

    @property
    def literal(self) -> str:
        """The header with its control token's name."""
        return (OPEN if self.opening else CLOSE) + self.text

    def read(self) -> tuple[str, dict[str, str]] | None:
        """Name and attributes, their values unescaped; None for a header that is wrong or of an unknown tag."""
        name, attributes, rest = self._split()
        return (name, attributes) if name in DEPTH and not rest else None

    def is_cut(self) -> bool:
        """Whether the header, which ended without `<|sep|>`, may be the beginning of a right one, and no long one."""
        if len(self.text) > LONGEST_CUT:
            return False
        return not self.tag or _CUT_ATTRIBUTE.fullmatch(self._split()[2]) is not None

    def _split(self) -> tuple[str, dict[str, str], str]:
        text = self.text
        name = _leading_name(text)
        attributes: dict[str, str] = {}
        position = len(name)
        while match := _ATTRIBUTE.match(text, position):
            attributes[match[1]] = match[2].replace("&quot;", '"').replace("&amp;", "&")
            position = match.end()
        return name, attributes, text[position:]


def _leading_name(text: str) -> str:
    match = _NAME.match(text)
    return match[0] if match else ""
