"""The Kimi K3 tokenizer: text to token ids and back.

K3 uses byte-pair encoding over bytes. A vocabulary file, `tiktoken.model`, lists the base tokens, one
`base64(bytes) rank` a line; the rank is the token's id. Behind the n base tokens stand 256 special ids, n to
n + 255. K3 has 163,584 base tokens, hence 163,840 ids.

Text is encoded in three steps: it is cut into chunks (`split_chunks`), each chunk is cut into pieces by a
regular expression that keeps Han apart from other letters, and in each piece the adjacent pair whose union
has the lowest rank is merged until no pair is a token. The last two steps are tiktoken's.

Text that people or tools wrote must never turn into control tokens, so there are two ways to encode:
`Tokenizer.encode` recognises no special token at all, `Tokenizer.encode_structural` recognises all of them.
"""

import base64
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import index
from os import PathLike
from pathlib import Path
from typing import SupportsIndex

import tiktoken

# Letters without case (Lo), modifiers (Lm) and marks (M) are in both classes: "[upper]*[lower]+" then takes
# whole words of scripts that have no case.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

MAX_CHUNK_CHARS = 400_000
MAX_RUN_CHARS = 25_000
NUM_SPECIAL = 256

# K3's names by distance from the first special id; every other slot is <|reserved_token_{id}|>.
_SPECIAL_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}

# Chunks are defined by str.isspace, with which Python's \s agrees; \s in the split pattern is Unicode's
# White_Space, which leaves out U+001C to U+001F.
_RUN = re.compile(r"\s+|\S+")

# int() would also take signs, underscores and digits of other scripts, and refuse thousands of digits.
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")


class TokenizerError(ValueError):
    """A vocabulary file, a token id or a special token's name that cannot be right."""


class Tokenizer:
    """Encodes text to token ids and decodes ids to text; made by `from_directory` or `from_file`.

    `num_base` is the number of base tokens, which have the ids 0 to `num_base` - 1; `vocab_size` counts the
    special tokens too.
    """

    def __init__(self, base_tokens: Mapping[bytes, int], special_tokens: Mapping[str, int]) -> None:
        self.num_base = len(base_tokens)
        self.vocab_size = len(base_tokens) + len(special_tokens)
        self._special_ids = dict(special_tokens)
        self._encoding = tiktoken.Encoding(
            "kimi",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=dict(base_tokens),
            special_tokens=self._special_ids,
            explicit_n_vocab=self.vocab_size,
        )

    @classmethod
    def from_directory(cls, directory: str | PathLike[str], *, expected_vocab_size: int | None = None) -> "Tokenizer":
        """Reads `tiktoken.model` and, where there is one, `tokenizer_config.json` from a model's directory.

        Of the config only `added_tokens_decoder` is used, which names special ids. No code is run.

        **Arguments:**

        - `directory`: where the files are.
        - `expected_vocab_size`: as for `from_file`.

        **Returns:** the tokenizer.

        **Raises:** `TokenizerError` for a file that is missing or damaged.
        """
        directory = Path(directory)
        config = directory / "tokenizer_config.json"
        names = _read_special_names(config) if config.exists() else None
        return cls.from_file(directory / "tiktoken.model", names, expected_vocab_size=expected_vocab_size)

    @classmethod
    def from_file(
        cls,
        path: str | PathLike[str],
        special_names: Mapping[int, str] | None = None,
        num_special: int = NUM_SPECIAL,
        *,
        expected_vocab_size: int | None = None,
    ) -> "Tokenizer":
        """Reads a `tiktoken.model` file.

        **Arguments:**

        - `path`: the file.
        - `special_names`: names by id that go before K3's. Ids outside the special slots are ignored on
            purpose: Kimi K2's names are left over at 163840 to 163846, where the embedding has no rows.
        - `num_special`: number of special slots behind the base tokens.
        - `expected_vocab_size`: the model config's `vocab_size`. Nothing else tells a file that was cut at
            the end of a line: it is a valid smaller vocabulary with all special ids shifted.

        **Returns:** the tokenizer.

        **Raises:** `TokenizerError` for a file that is missing, damaged or of another size.
        """
        path = Path(path)
        base_tokens = _read_base_tokens(path)
        num_base = len(base_tokens)
        if expected_vocab_size is not None and num_base + num_special != expected_vocab_size:
            raise TokenizerError(
                f"{path}: {num_base} base + {num_special} special tokens are {num_base + num_special}, but "
                f"the model's vocab_size is {expected_vocab_size}: cut short, or another model's file?"
            )
        return cls(base_tokens, _named_slots(path, num_base, num_special, special_names or {}))

    def encode(self, text: str) -> list[int]:
        """Encodes text as content: a typed `<|open|>` gives the ordinary tokens of its characters.

        The published `encode()` recognises special tokens unless told otherwise. Here the safe way is the
        default: nearly all text comes from people and tools, who could otherwise forge roles and results.
        Time grows about linearly with the text, and other Python threads run meanwhile.

        **Arguments:**

        - `text`: any text; a lone surrogate is taken for U+FFFD.

        **Returns:** token ids, all below `num_base`. No `[BOS]` is put in front.
        """
        ids: list[int] = []
        for chunk in split_chunks(text):
            ids.extend(self._encoding.encode_ordinary(chunk))
        return ids

    def encode_structural(self, text: str) -> list[int]:
        """Encodes text in which every special token's name stands for its id.

        Only for text that this program wrote. As published, chunks are cut first, so a name across a chunk
        border is not recognised.

        **Arguments:**

        - `text`: text with names of special tokens.

        **Returns:** token ids.
        """
        ids: list[int] = []
        for chunk in split_chunks(text):
            ids.extend(self._encoding.encode(chunk, allowed_special="all"))
        return ids

    def decode(self, ids: Iterable[SupportsIndex], errors: str = "replace") -> str:
        """Decodes ids to text; special tokens give their names.

        **Arguments:**

        - `ids`: token ids.
        - `errors`: what to do about bytes that are not UTF-8, as for `bytes.decode`.

        **Returns:** the text.

        **Raises:** `TokenizerError` for an id outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", errors)

    def decode_bytes(self, ids: Iterable[SupportsIndex]) -> bytes:
        """The bytes that `decode` makes text of."""
        checked = [index(token_id) for token_id in ids]
        for token_id in checked:
            if not 0 <= token_id < self.vocab_size:
                raise TokenizerError(f"token id {token_id} is outside the vocabulary 0-{self.vocab_size - 1}")
        return self._encoding.decode_bytes(checked)

    def incremental_decoder(self) -> "IncrementalDecoder":
        """A decoder that takes one id at a time, for streaming."""
        return IncrementalDecoder(self)

    def special_id(self, name: str) -> int:
        """The id of the special token called `name`; `TokenizerError` if there is none."""
        if name not in self._special_ids:
            raise TokenizerError(f"this vocabulary has no special token {name!r}")
        return self._special_ids[name]

    def special_name(self, token_id: SupportsIndex) -> str:
        """The name of the special token with this id; `TokenizerError` if the id is not a special one."""
        if not self.is_special(token_id):
            last = self.vocab_size - 1
            raise TokenizerError(f"token id {index(token_id)} is not in the special range {self.num_base}-{last}")
        return self.decode([token_id])

    def is_special(self, token_id: SupportsIndex) -> bool:
        """Whether the id is that of a special token."""
        return self.num_base <= index(token_id) < self.vocab_size

    @property
    def bos_id(self) -> int:
        """`[BOS]`. Chat prompts do not use it."""
        return self.special_id("[BOS]")

    @property
    def eos_id(self) -> int:
        """`[EOS]`. Messages end with `end_of_msg_id` instead, but generation has to stop at either."""
        return self.special_id("[EOS]")

    @property
    def end_of_msg_id(self) -> int:
        """`<|end_of_msg|>`, which ends a message and stops generation."""
        return self.special_id("<|end_of_msg|>")

    @property
    def pad_id(self) -> int:
        """`[PAD]`."""
        return self.special_id("[PAD]")


class IncrementalDecoder:
    """Decodes ids one by one and never gives out part of a character.

    What `push` and `flush` return, joined, is what `Tokenizer.decode` makes of all the ids: bytes wait only
    while they can still become a character, and U+FFFD comes out as soon as they cannot.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: SupportsIndex) -> str:
        """Takes the next id and returns the text that is certain now, perhaps none."""
        return self._utf8.decode(self._tokenizer.decode_bytes([token_id]))

    def flush(self) -> str:
        """Ends the text: returns U+FFFD if it stopped inside a character, otherwise nothing."""
        return self._utf8.decode(b"", final=True)


def split_chunks(text: str, max_chars: int = MAX_CHUNK_CHARS, max_run: int = MAX_RUN_CHARS) -> Iterator[str]:
    """Cuts text into the chunks that are encoded apart from each other.

    Text is cut every `max_chars` characters. In such a block a run of more than `max_run` whitespace or
    non-whitespace characters is cut after every `max_run` of them, counted from the start of the run in that
    block. The published limits protect tiktoken, but no token reaches over a cut, so they also decide ids.

    **Arguments:**

    - `text`: any text.
    - `max_chars`: length of a block.
    - `max_run`: longest run of one sort of characters.

    **Returns:** the chunks in order; joined they are the text.
    """
    for offset in range(0, len(text), max_chars):
        block = text[offset : offset + max_chars]
        start = 0
        for run in _RUN.finditer(block) if len(block) > max_run else ():
            for cut in range(run.start() + max_run, run.end(), max_run):
                yield block[start:cut]
                start = cut
        yield block[start:]


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise TokenizerError(f"{path}: no such file") from None
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"0x{data[error.start]:02x}"
        raise TokenizerError(f"{path}: line {line}: byte {byte} is not UTF-8, so not a text file") from None


def _read_base_tokens(path: Path) -> dict[bytes, int]:
    """Reads `base64 rank` lines, in any order, and checks that they make a whole vocabulary."""
    text = _read_text(path)
    if not text.strip():
        raise TokenizerError(f"{path}: the file is empty")
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}  # by rank
    unfinished = 0 if text.endswith("\n") else text.count("\n") + 1
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        where = f"{path}: line {number}"
        if number == unfinished:
            where += " (unfinished: is the file cut short?)"
        fields = line.split()
        if len(fields) != 2:
            raise TokenizerError(f"{where}: expected 'base64 rank', found {_shown(line)}")
        try:
            token = base64.b64decode(fields[0], validate=True)
        except ValueError as error:
            raise TokenizerError(f"{where}: {_shown(fields[0])} is not base64: {error}") from None
        if not _WHOLE_NUMBER.fullmatch(fields[1]):
            raise TokenizerError(f"{where}: rank {_shown(fields[1])} is not a whole number")
        rank = int(fields[1])
        if rank in lines:
            raise TokenizerError(f"{where}: rank {rank} is already taken by line {lines[rank]}")
        if token in ranks:
            raise TokenizerError(f"{where}: token {token!r} already stands on line {lines[ranks[token]]}")
        ranks[token] = rank
        lines[rank] = number

    for expected, rank in enumerate(sorted(lines)):
        if rank != expected:
            raise TokenizerError(f"{path}: line {lines[rank]}: rank {rank}, but no line has rank {expected}")
    # Without one of these some text would have no encoding at all.
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{path}: {len(missing)} of the 256 single bytes have no token, first 0x{missing[0]:02x}; is the "
            f"file cut short after line {len(ranks)}?"
        )
    return ranks


def _read_special_names(path: Path) -> dict[int, str]:
    """Reads the names of added tokens, by id, from a `tokenizer_config.json`."""
    try:
        config = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path}: line {error.lineno}: not JSON: {error.msg}") from None
    entries = config.get("added_tokens_decoder", {}) if isinstance(config, dict) else None
    if not isinstance(entries, dict):
        raise TokenizerError(f"{path}: expected an object in which 'added_tokens_decoder' is an object")
    names: dict[int, str] = {}
    for key, entry in entries.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not (_WHOLE_NUMBER.fullmatch(key) and isinstance(name, str) and name):
            raise TokenizerError(
                f"{path}: added_tokens_decoder: expected an id with a non-empty 'content', found "
                f"{_shown(key)}: {_shown(json.dumps(entry))}"
            )
        names[int(key)] = name
    return names


def _named_slots(path: Path, num_base: int, num_special: int, names: Mapping[int, str]) -> dict[str, int]:
    """Ids of the special slots by name: as in `names`, else K3's where still free, else reserved."""
    slots = range(num_base, num_base + num_special)
    given = {names[token_id] for token_id in slots if token_id in names}
    ids: dict[str, int] = {}
    for token_id in slots:
        ours = _SPECIAL_NAMES.get(token_id - num_base)
        if ours is None or ours in given:
            ours = f"<|reserved_token_{token_id}|>"
        name = names.get(token_id, ours)
        if name in ids:
            raise TokenizerError(f"{path}: special ids {ids[name]} and {token_id} are both named {name!r}")
        ids[name] = token_id
    return ids


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
