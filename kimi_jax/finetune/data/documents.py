"""Documents: what a line of a JSON file becomes, token ids and a weight for each.

A line is an object with one of two keys:

- `text`: a text. The document is its tokens and the end token, all of weight 1.
- `messages`: a conversation as `kimi_jax.chat.render` takes it. Beside it may stand `tools`, `thinking`, `effort`,
  `tool_choice`, `response_format` and `response_schema`, which are `render`'s. Weight 1 have the tokens that the
  model itself has to write, in every turn of the assistant: what follows the generation prompt, up to and with
  `<|end_of_msg|>`.

Control tokens spelled in any text are plain text. An assistant message without thinking is rendered with empty
thinking, and then trains the model not to think: give `thinking: false`, in the line or for all lines, where the
conversations have none.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from kimi_jax.chat.errors import found
from kimi_jax.chat.options import BEHIND, request_options
from kimi_jax.chat.render import render
from kimi_jax.chat.segments import SEP, Segment, segments_ids
from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.finetune.data.errors import DataError
from kimi_jax.finetune.data.lines import Lines

_LOG = logging.getLogger(__name__)


class Document(NamedTuple):
    """A document of n tokens, at least 2.

    - `tokens`: the ids.
    - `weights`: what each counts in the loss when it is predicted; the first never is.
    """

    tokens: Int32[np.ndarray, " n"]
    weights: Float32[np.ndarray, " n"]


class Documents:
    """The documents of some JSON-lines files, by line number; read, rendered and tokenised where asked.

    - `lines`: the lines.
    - `settings`: what tells these documents apart from others, for a saved position.
    - `broken`: of the lines found broken so far, the numbers and what is wrong.
    """

    def __init__(
        self,
        files: Lines | Sequence[str | PathLike[str]],
        tokenizer: Tokenizer,
        *,
        train_on: str = "assistant",
        end_id: int | None = None,
        options: Mapping[str, Any] | None = None,
        on_error: str = "skip",
        report: Callable[[str], None] = _LOG.warning,
    ) -> None:
        """Finds the lines, and in every file one that can be used; reads all of them where a broken one is fatal.

        **Arguments:**

        - `files`: their paths, or their lines.
        - `tokenizer`: the model's.
        - `train_on`: which tokens of a conversation have weight 1: `assistant` as above, or `all`.
        - `end_id`: the token that ends a text; None means `[EOS]`.
        - `options`: options of `render` for all lines that do not say otherwise.
        - `on_error`: what becomes of a broken line: `skip` reports it when it is read and leaves it out, `fatal` raises
            here, before anything is trained.
        - `report`: is called with a text once for each line left out.

        **Raises:** `DataError` for a file without a line that can be used, or with a broken one if these are fatal;
        `ValueError` for an option that is none.
        """
        if train_on not in ("assistant", "all"):
            raise ValueError(f"train_on: found {train_on!r}, wanted 'assistant' or 'all'")
        if on_error not in ("skip", "fatal"):
            raise ValueError(f"on_error: found {on_error!r}, wanted 'skip' or 'fatal'")
        self.lines = files if isinstance(files, Lines) else Lines(files)
        self.broken: dict[int, str] = {}
        self._tokenizer = tokenizer
        self._all = train_on == "all"
        self._end_id = tokenizer.eos_id if end_id is None else end_id
        self._options = dict(options or {})
        self._fatal = on_error == "fatal"
        self._report = report
        self.settings: dict[str, Any] = {
            "data": self.lines.digest,
            "vocab_size": tokenizer.vocab_size,
            "train_on": train_on,
            "end_id": self._end_id,
            "options": json.dumps(self._options, sort_keys=True),
        }
        for index, path in enumerate(self.lines.paths):
            numbers = self.lines.of_file(index)
            if self._fatal:
                for number in numbers:
                    self.read(number)
            elif all(self.read(number) is None for number in numbers):
                first = self.broken[numbers[0]]
                raise DataError(f"{path}: none of its {len(numbers)} lines can be used; the first: {first}")

    def __len__(self) -> int:
        """Lines, the broken ones among them."""
        return len(self.lines)

    def read(self, number: int) -> Document | None:
        """The document of line `number`; None for a broken line.

        **Raises:** `DataError` for a broken line, if these are fatal.
        """
        if number in self.broken:
            return None
        try:
            return self._document(_record(self.lines.read(number)))
        except ValueError as error:
            text = f"{self.lines.place(number)}: {error}"
            if self._fatal:
                raise DataError(text) from None
            self.broken[number] = text
            self._report(f"{text}; the line is left out")
            return None

    def _document(self, record: Mapping[str, Any]) -> Document:
        if ("text" in record) == ("messages" in record):
            both = "both" if "text" in record else "neither"
            raise DataError(f"found {both} of the keys 'text' and 'messages', wanted one of them")
        if "messages" in record:
            return self._conversation(record)
        text = record["text"]
        if not isinstance(text, str) or not text:
            raise DataError(f"text: found {found(text)}, wanted a text that is not empty")
        ids = [*self._tokenizer.encode(text), self._end_id]
        return Document(np.array(ids, np.int32), np.ones(len(ids), np.float32))

    def _conversation(self, record: Mapping[str, Any]) -> Document:
        messages = record["messages"]
        options = {**self._options, **request_options(record), "add_generation_prompt": False}
        segments = _as_served(render(messages, **options), messages)
        if not messages:
            raise DataError("messages: found no message, wanted at least one")
        if any(segment.part == "image" for segment in segments):
            raise DataError("messages: found an image, wanted text only, as the model here reads no images")
        ids: list[int] = []
        weights: list[bool] = []
        marked = zip(_written_by_model(segments, messages), segments, strict=True)
        for written, run in groupby(marked, key=lambda pair: pair[0]):
            new = segments_ids([segment for _, segment in run], self._tokenizer)
            ids += new
            weights += [written or self._all] * len(new)
        if not any(weights):
            wanted = "one of the assistant, whose tokens alone are trained on (train_on='all' takes all)"
            raise DataError(f"messages: found none of role 'assistant', wanted {wanted}")
        return Document(np.array(ids, np.int32), np.array(weights, np.float32))


def _record(line: bytes) -> Mapping[str, Any]:
    line = line.rstrip()
    if not line:
        raise DataError("found an empty line, wanted a JSON object")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"found {found(record)}, wanted an object with 'text' or 'messages'")
    return record


def _as_served(segments: Sequence[Segment], messages: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """The options that stand behind the messages (tool choice, response format) go before a last answer.

    There they are when the model writes it.
    """
    before = [segment for segment in segments if segment.part not in BEHIND]
    behind = [segment for segment in segments if segment.part in BEHIND]
    last = len(messages) - 1
    if not behind or last < 0 or messages[last]["role"] != "assistant":
        return before + behind
    at = next(place for place, segment in enumerate(before) if segment.message == last)
    return before[:at] + behind + before[at:]


def _written_by_model(segments: Sequence[Segment], messages: Sequence[Mapping[str, Any]]) -> list[bool]:
    """For each segment, whether the model has to write it.

    The generation prompt is the header of the assistant's message and the opening tag of its first channel: both end
    with a separator, and what follows the second is the model's.
    """
    separators: dict[int, int] = {}
    written = []
    for segment in segments:
        message = segment.message
        if message is None or messages[message]["role"] != "assistant":
            written.append(False)
            continue
        seen = separators.get(message, 0)
        written.append(seen >= 2)
        separators[message] = seen + (segment.structural and segment.text == SEP)
    return written
