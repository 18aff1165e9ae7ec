"""Reads what K3 generates: token ids one by one to reasoning, answer and tool calls.

Structure comes from token ids alone. Four control tokens, `<|open|>`, `<|close|>`, `<|sep|>` and
`<|end_of_msg|>`, make it; ordinary tokens that spell one of them are text. A completion goes on where the
generation prompt stopped, inside `think` or inside `response`:

    REASONING close(think) open(response) ANSWER close(response)
    [ open(tools) call+ close(tools) ] close(message) <|end_of_msg|>
    call     = open(call tool="NAME" index="N") argument* close(call)
    argument = open(argument key="KEY" type="TYPE") VALUE close(argument)

Models do not always keep to this, and generation may stop anywhere. Nothing raises, and no text is lost:

- The opening of an element ends those that cannot hold it: one of `response`, `tools` or `call` ends
    reasoning. So do the close of an outer element and a stop token. The close of an element that is not open
    does nothing.
- `<|sep|>` may be missing where another control token follows, or, after a tag without attributes, other text.
- A `call` outside `tools` is a call. One without `tool` has the name "", an argument without `key` the key "".
- Unknown tags, headers that do not parse, arguments outside calls, a `<|sep|>` inside text and all other
    special tokens are text, control tokens by their names. An id outside the vocabulary is U+FFFD.
- Text between elements is part of the answer, except white space next to a tag, which is dropped.
- Text that `close(response)` ends while `think` is open, and that no response follows, is the answer of a
    model that did not think. It has gone out as reasoning by then and comes once more as content.
- An opening `message` tag of the assistant, as the generation prompt has it, does nothing while the message is
    open. One of another role, or any after `close(message)`, starts a message that is not ours, and reading
    stops as at a stop token.
- At the end a header that was cut short is dropped, or is text if it is longer than 256 characters, half a
    character becomes U+FFFD, and a call that is open gets the quotes and braces that make its arguments JSON.
    See `OutputParser.calls_closed` before running it.
"""

import codecs
from operator import index
from typing import Any, SupportsIndex

from kimi_jax.chat.deltas import CallArguments, CallStart, ContentDelta, Delta, MessageBuilder, ReasoningDelta
from kimi_jax.chat.headers import DEPTH, Header
from kimi_jax.chat.segments import CLOSE, END_OF_MESSAGE, OPEN, SEP
from kimi_jax.chat.tokenizer import Tokenizer

__all__ = ["CallArguments", "CallStart", "ContentDelta", "Delta", "OutputParser", "ReasoningDelta"]

# The released model also ends with the second.
_STOPS = (END_OF_MESSAGE, "[EOS]")


class OutputParser:
    """Reads one generated message, an id at a time. Time and memory grow linearly with the output.

    **Attributes:**

    - `finished`: whether a stop token (`<|end_of_msg|>` or `[EOS]`) has come, or the start of another message.
        From then on ids are ignored.
    - `complete`: whether the output came to its proper end: all channels closed, then the message, then a stop
        token, and every call and argument closed by its own tag.
    - `calls_closed`: whether every call and argument so far was closed by its own tag, and none is open. Then the
        message's calls are whole and may be made, even if the close of `tools` or `message` is missing; otherwise
        one may lack arguments or the end of one. True without calls. Ask once the output has ended: more calls
        may follow before.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool = True, first_call: int = 0) -> None:
        """Starts where the generation prompt stopped.

        **Arguments:**

        - `tokenizer`: the one that the ids belong to.
        - `thinking`: whether the generation prompt opened `think` rather than `response`.
        - `first_call`: number of tool calls earlier in the conversation. Call i of this message has the id
            `{name}:{first_call + i}`, so that no id comes twice.

        **Raises:** `TokenizerError` if the vocabulary lacks one of the control tokens.
        """
        self.finished = False
        self.complete = False
        self._tokenizer = tokenizer
        self._tokens: dict[int, bytes] = {}  # those that came, by id
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._controls = {tokenizer.special_id(name): name for name in (OPEN, CLOSE, SEP, *_STOPS)}

        self._parts = MessageBuilder(first_call)
        self._where = "think" if thinking else "response"
        self._header: Header | None = None
        self._rejected = False  # the last header turned out to be text, and so is its <|sep|>
        self._space: list[str] = []  # white space between elements
        self._unanswered = False  # think was closed as a response, and no response has come yet
        self._cut_call = False  # a call or argument was closed by something else
        self._message_closed = False  # close(message) has come
        self._closed = False  # the last id was that of a proper end of the message
        self._over = False  # nothing more is read

    def push(self, token_id: SupportsIndex) -> list[Delta]:
        """Takes the next id.

        **Arguments:**

        - `token_id`: any integer.

        **Returns:** what is certain now, perhaps nothing. No delta has an empty text, and a call's `CallStart`
        comes before its `CallArguments`.
        """
        if self._over:
            return []
        token_id = index(token_id)
        closed, self._closed = self._closed, False
        control = self._controls.get(token_id)
        if control is None:
            token = self._tokens.get(token_id)
            self._take(self._utf8.decode(self._token(token_id) if token is None else token))
        else:
            self._take(self._utf8.decode(b"", final=True))
            self._control(control, closed)
        return self._parts.take_deltas()

    def finish(self) -> list[Delta]:
        """Ends the output, wherever it stands; needed unless `finished`, and harmless then.

        **Returns:** the deltas that were still due.
        """
        if not self._over:
            self._take(self._utf8.decode(b"", final=True))
            self._end()
        return self._parts.take_deltas()

    @property
    def calls_closed(self) -> bool:
        """Whether no call or argument is open or was cut; see the class."""
        return not self._cut_call and DEPTH[self._where] < 2

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message so far, in the form of OpenAI's interface: all deltas joined.

        `content` is always there, `reasoning_content` and `tool_calls` only if not empty. `arguments` is JSON
        text once the output has ended. It is put together anew every time.
        """
        return self._parts.message()

    def _token(self, token_id: int) -> bytes:
        inside = 0 <= token_id < self._tokenizer.vocab_size
        # No text has the byte 0xFF, so that it becomes U+FFFD by itself.
        token = self._tokens[token_id] = self._tokenizer.decode_bytes([token_id]) if inside else b"\xff"
        return token

    def _control(self, name: str, closed: bool) -> None:
        rejected, self._rejected = self._rejected, False
        if name in _STOPS:
            self._end()
            self.finished = True
            self.complete = closed and self.calls_closed
            return
        if self._header is not None:
            header, self._header = self._header, None
            self._end_header(header, with_sep=name == SEP)
        elif name == SEP and (rejected or self._where not in ("message", "tools", "call")):
            self._text(name)
        if name != SEP:
            self._header = Header(opening=name == OPEN)

    def _take(self, text: str) -> None:
        if self._header is None:
            self._text(text)
        elif text and not self._header.add(text):
            header, self._header = self._header, None
            if header.tag and not header.has_attributes:
                self._tag(header.opening, header.tag, {})
                self._closed = False
                self._text(header.text[len(header.tag) :])
            else:
                self._rejected = True
                self._text(header.literal)

    def _end_header(self, header: Header, *, with_sep: bool) -> None:
        read = header.read()
        if read is None or not self._tag(header.opening, *read):
            self._text(header.literal + (SEP if with_sep else ""))
        self._closed &= with_sep

    def _tag(self, opening: bool, tag: str, attributes: dict[str, str]) -> bool:
        """Acts on a tag; False if it cannot stand here, so that it is text."""
        if not opening:
            self._close(tag)
        elif DEPTH[tag] == 3 and DEPTH[self._where] < 2:
            return False
        else:
            self._open(tag, attributes)
        self._space.clear()
        return True

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "message":
            if self._message_closed or attributes.get("role", "assistant") != "assistant":
                self._end()
                self.finished = True
            return
        self._leave(DEPTH[tag] - 1)
        if tag in ("think", "response"):
            self._unanswered = False
        else:
            self._answer()
        self._where = tag
        if tag == "think":
            self._parts.begin_reasoning()
        elif tag == "call":
            self._parts.begin_call(attributes.get("tool", ""))
        elif tag == "argument":
            begun = self._parts.arguments.begin(attributes.get("key", ""), attributes.get("type"))
            self._parts.add_arguments(begun)
        elif tag == "json":
            self._parts.arguments.begin_raw()

    def _close(self, tag: str) -> None:
        if tag == "message":
            self._closed = self._where == "message"
            self._message_closed = True
            self._leave(0)
            self._answer()
        elif tag == self._where:
            self._leave(DEPTH[tag] - 1, own_tag=True)
        elif tag == "response" and self._where == "think":
            self._leave(0)
            self._unanswered = True
        elif tag in ("tools", "call") and DEPTH[self._where] > DEPTH[tag]:
            self._leave(DEPTH[tag] - 1)

    def _leave(self, depth: int, *, own_tag: bool = False) -> None:
        """Ends all elements deeper than `depth`."""
        left = DEPTH[self._where]
        if left <= depth:
            return
        if left >= 2 and not own_tag:
            self._cut_call = True
        if left == 3:
            self._parts.add_arguments(self._parts.arguments.end())
        if left >= 2 and depth < 2:
            self._parts.add_arguments(self._parts.arguments.close())
        self._where = ("message", "tools", "call")[depth]

    def _end(self) -> None:
        """Ends the message here."""
        header, self._header = self._header, None
        if header is not None:
            read = None if header.opening else header.read()
            if read is not None:
                self._tag(False, *read)
            elif not header.is_cut():
                self._text(header.literal)
        self._leave(0)
        self._answer()
        self._over = True

    def _text(self, text: str) -> None:
        if self._where == "response":
            self._parts.add_content(text)
        elif self._where == "think":
            self._parts.add_reasoning(text)
        elif self._where in ("argument", "json"):
            self._parts.add_arguments(self._parts.arguments.add(text))
        elif text:
            self._between(text)

    def _between(self, text: str) -> None:
        visible = text.rstrip()
        if visible:
            self._unanswered = False
            self._parts.add_content("".join(self._space) + visible)
            self._space.clear()
        self._space.append(text[len(visible) :])

    def _answer(self) -> None:
        if self._unanswered:
            self._unanswered = False
            self._parts.answer_with_reasoning()
