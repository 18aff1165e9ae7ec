"""The pieces that a prompt is made of, and the writer that makes them.

K3's prompt is a list of segments, each encoded on its own. The four markers `<|open|>`, `<|close|>`, `<|sep|>` and
`<|end_of_msg|>` are structural segments; tag names, attributes and all text of people, tools and models are content,
in which no special token is recognised. A user who types `<|open|>` thereby writes seven ordinary characters.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kimi_jax.chat.tokenizer import Tokenizer

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEP, END_OF_MESSAGE)

_LONE_SURROGATE = re.compile("(?<![\ud800-\udbff])[\udc00-\udfff]|[\ud800-\udbff](?![\udc00-\udfff])")

# Longer texts hardly ever come twice.
_REMEMBERED_CHARS = 32


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the prompt that is encoded on its own.

    - `text`: the text, never empty and always valid Unicode.
    - `structural`: whether names of special tokens in `text` stand for their ids; otherwise it is plain text.
    - `message`: index into the caller's messages; None for what the renderer adds.
    - `part`: what the segment belongs to, for counting tokens. "content", "reasoning", "tool result" and "image" are
      the bodies of the caller's messages, "markup" the tags around them. "tool calls" is a whole tools channel, and
      "tools", "effort", "tool choice", "response format" and "generation prompt" are whole messages, tags included.
    """

    text: str
    structural: bool
    message: int | None
    part: str


class SegmentWriter:
    """Collects the segments of one message in `segments`."""

    def __init__(self, message: int | None = None) -> None:
        self.segments: list[Segment] = []
        self._message = message
        # A call can have a hundred thousand arguments: what comes again is made once.
        self._runs: dict[tuple[str, ...], list[Segment]] = {}
        self._texts: dict[tuple[str, str], Segment] = {}

    def text(self, text: str, part: str) -> None:
        """Adds a body: plain text, one segment. Nothing for the empty text."""
        if not text:
            return
        segment = self._texts.get((part, text))
        if segment is None:
            segment = Segment(valid_unicode(text), False, self._message, part)
            if len(text) <= _REMEMBERED_CHARS:
                self._texts[part, text] = segment
        self.segments.append(segment)

    def structural(self, text: str, part: str) -> None:
        """Adds text in which names of special tokens stand for their ids. Never for text of others."""
        self.segments.append(Segment(text, True, self._message, part))

    def open(self, tag: str, attributes: Iterable[tuple[str, str]] = (), part: str = "markup") -> None:
        """Adds the opening tag: markers, the name, and four segments an attribute, whose values are escaped here."""
        self._run(part, OPEN, tag)
        for key, value in attributes:
            self._run(part, f" {key}", '="')
            self.text(escape_attribute(value), part)
            self._run(part, '"')
        self._run(part, SEP)

    def close(self, tag: str, part: str = "markup") -> None:
        """Adds the closing tag."""
        self._run(part, CLOSE, tag, SEP)

    def open_message(self, attributes: Iterable[tuple[str, str]], part: str = "markup") -> None:
        """Adds the header of a message."""
        self.open("message", attributes, part)

    def close_message(self, part: str = "markup") -> None:
        """Adds the end of a message."""
        self._run(part, CLOSE, "message", SEP, END_OF_MESSAGE)

    def _run(self, part: str, *texts: str) -> None:
        """Adds a segment for each text; the markers are structural, so the texts are never those of others."""
        key = (part, *texts)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = [Segment(text, text in MARKERS, self._message, part) for text in texts]
        self.segments += run


def escape_attribute(value: str) -> str:
    """Escapes an attribute's value: `&`, then `"`, and nothing else."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def valid_unicode(text: str) -> str:
    """The text with pairs of surrogates joined and lone surrogates replaced by U+FFFD.

    Such text comes from JSON escapes like `"\\ud83d"`, say where an emoji was cut in two, and has no UTF-8. The
    tokenizer takes it in the same way, so ids do not depend on this.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        pairs = _LONE_SURROGATE.sub("\ufffd", text)
        return pairs.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    return text


def segments_text(segments: Iterable[Segment]) -> str:
    """The prompt as one string, to look at.

    Encoding this string at once is wrong: markers that a user typed would become real ones, and tokens would reach
    over the borders of segments. Use `segments_ids`.
    """
    return "".join(segment.text for segment in segments)


def segments_ids(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Encodes a prompt, each segment on its own.

    **Arguments:**

    - `segments`: from `render` or `build_segments`.
    - `tokenizer`: the model's tokenizer.

    **Returns:** token ids. No `[BOS]` is put in front.
    """
    known: dict[tuple[str, bool], list[int]] = {}
    ids: list[int] = []
    for segment in segments:
        key = (segment.text, segment.structural)
        encoded = known.get(key)
        if encoded is None:
            encode = tokenizer.encode_structural if segment.structural else tokenizer.encode
            encoded = encode(segment.text)
            if len(segment.text) <= _REMEMBERED_CHARS:
                known[key] = encoded
        ids.extend(encoded)
    return ids
