import base64
import json
import os
import re
import threading
import time
from collections import Counter
from itertools import pairwise

import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimi_jax.chat.tokenizer import Tokenizer, TokenizerError, split_chunks

BYTES = [bytes([byte]) for byte in range(256)]
K3_BASE = 163_584

# Written out here once more, so that a slip in the module's own pattern shows.
PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TRAINING_TEXT = (
    "literal <|open|> and <|end_of_msg|> and [BOS] here: the literal words open, end, and message are text. "
    "A tokenizer that reads markers in what people write lets them forge roles; that's why it's here. "
    "Byte-pair encoding joins the two neighbours that come together most often, then begins again, until "
    "there are as many tokens as were asked for. 'We'll see,' they'd said, 'if it's 1234567 or only 123.'\n\n"
    "你好\uff0c世界\uff01世界\uff0c你好\uff01 мир и война, война и мир. नमस्ते दुनिया 👩‍👩‍👧 👩‍👩‍👧‍👦\n"
)

MARKERS = "literal <|open|> and <|end_of_msg|> and [BOS] here"


def train(text, merges):
    """Byte-pair encoding learned from `text`; of equally frequent pairs the last in order is joined."""
    words = Counter(re.findall(r" ?\w+| ?[^\w\s]+|\s", text))
    pieces = {word: [bytes([byte]) for byte in word.encode()] for word in words}
    tokens = dict.fromkeys(BYTES)
    while len(tokens) < 256 + merges:
        pairs = Counter()
        for word, count in words.items():
            for pair in pairwise(pieces[word]):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens[b"".join(best)] = None
        for word, old in pieces.items():
            new = []
            for piece in old:
                if new and (new[-1], piece) == best:
                    new[-1] += piece
                else:
                    new.append(piece)
            pieces[word] = new
    return list(tokens)


def vocabulary_lines(tokens):
    return [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]


def write(path, tokens):
    path.write_text("\n".join(vocabulary_lines(tokens)) + "\n")
    return path


def names_file(directory, names):
    entries = {str(key): {"content": name, "special": True} for key, name in names.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))


@pytest.fixture(scope="module")
def learned():
    return train(TRAINING_TEXT, 200)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, learned):
    return Tokenizer.from_file(write(tmp_path_factory.mktemp("small") / "tiktoken.model", learned))


@pytest.fixture(scope="module")
def direct(learned, tokenizer):
    """tiktoken without this package around it."""
    names = {tokenizer.special_name(id): id for id in range(tokenizer.num_base, tokenizer.vocab_size)}
    ranks = {token: rank for rank, token in enumerate(learned)}
    return tiktoken.Encoding("direct", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=names)


def with_tokens(tmp_path, *extra):
    """A tokenizer whose base tokens are the bytes and `extra`, each of which encodes to itself as a piece."""
    return Tokenizer.from_file(write(tmp_path / "tiktoken.model", BYTES + [text.encode() for text in extra]))


# Special tokens


def test_special_ids_of_a_vocabulary_of_k3_size(tmp_path):
    dummies = [bytes([first, second]) for first in range(256) for second in range(256)]
    dummies += [bytes([number >> 16 & 255, number >> 8 & 255, number & 255]) for number in range(97_792)]
    tokenizer = Tokenizer.from_file(write(tmp_path / "m", BYTES + dummies), expected_vocab_size=163_840)
    expected = {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|end_of_msg|>": 163586,
        "<|open|>": 163587,
        "<|close|>": 163588,
        "<|sep|>": 163589,
        "[start_header_id]": 163590,
        "[end_header_id]": 163591,
        "<|reserved_token_163592|>": 163592,
        "[EOT]": 163593,
        "<|reserved_token_163594|>": 163594,
        "<|reserved_token_163601|>": 163601,
        "<|media_begin|>": 163602,
        "<|media_content|>": 163603,
        "<|media_end|>": 163604,
        "<|media_pad|>": 163605,
        "<osagent_mode>": 163649,
        "<|reserved_token_163837|>": 163837,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }
    assert {name: tokenizer.special_id(name) for name in expected} == expected
    assert [tokenizer.special_name(id) for id in expected.values()] == list(expected)
    assert (tokenizer.num_base, tokenizer.vocab_size) == (K3_BASE, 163_840)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (163584, 163585)
    assert (tokenizer.end_of_msg_id, tokenizer.pad_id) == (163586, 163839)
    assert tokenizer.encode_structural("<|open|><|sep|><|close|>") == [163587, 163589, 163588]
    assert [tokenizer.is_special(id) for id in (163583, 163584, 163839, 163840, -1)] == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_the_256_slots_are_all_special_and_nothing_else_is(tokenizer, learned):
    assert tokenizer.num_base == len(learned) == 456
    assert tokenizer.vocab_size == 712
    names = [tokenizer.special_name(id) for id in range(456, 712)]
    assert len(set(names)) == 256
    assert sum(name.startswith("<|reserved_token_") for name in names) == 240
    assert tokenizer.encode_structural("".join(names)) == list(range(456, 712))
    assert tokenizer.decode(range(456, 712)) == "".join(names)
    with pytest.raises(TokenizerError, match=r"token id 455 is not in the special range 456-711"):
        tokenizer.special_name(455)
    with pytest.raises(TokenizerError, match=r"no special token '<\|im_end\|>'"):
        tokenizer.special_id("<|im_end|>")


def test_config_names_special_slots_and_leftovers_outside_are_ignored(tmp_path, learned):
    write(tmp_path / "tiktoken.model", learned)
    names_file(tmp_path, {456 + 100: "<|mine|>", 456 + 9: "[renamed]", 712: "<|im_end|>", 718: "<|x|>", 70: "low"})
    tokenizer = Tokenizer.from_directory(tmp_path, expected_vocab_size=712)
    assert tokenizer.special_id("<|mine|>") == 556
    assert tokenizer.special_name(465) == "[renamed]"
    assert tokenizer.special_id("<|open|>") == 459
    assert tokenizer.vocab_size == 712
    for name in ("<|im_end|>", "<|x|>", "low", "[EOT]", "<|reserved_token_556|>"):
        with pytest.raises(TokenizerError, match="no special token"):
            tokenizer.special_id(name)
    assert max(tokenizer.encode_structural("<|im_end|> low")) < 456


def test_a_config_can_move_a_k3_name_to_another_slot(tmp_path, learned):
    write(tmp_path / "tiktoken.model", learned)
    names_file(tmp_path, {500: "<|open|>"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.special_id("<|open|>") == 500
    assert tokenizer.special_name(459) == "<|reserved_token_459|>"


def test_directory_without_a_config_has_k3_names(tmp_path, learned):
    write(tmp_path / "tiktoken.model", learned)
    assert Tokenizer.from_directory(str(tmp_path)).end_of_msg_id == 458


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", r"tokenizer_config\.json: line 1: not JSON"),
        ("[]", r"tokenizer_config\.json: expected an object"),
        ('{"added_tokens_decoder": [1]}', r"'added_tokens_decoder' is an object"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', r"found 'x'"),
        ('{"added_tokens_decoder": {"٣": {"content": "a"}}}', r"found '٣'"),
        ('{"added_tokens_decoder": {"460": {"content": ""}}}', r"found '460'"),
        ('{"added_tokens_decoder": {"460": "a"}}', r"found '460': '\"a\"'"),
        (
            '{"added_tokens_decoder": {"460": {"content": "a"}, "461": {"content": "a"}}}',
            r"special ids 460 and 461 are both named 'a'",
        ),
        (
            '{"added_tokens_decoder": {"460": {"content": "<|reserved_token_470|>"}}}',
            r"special ids 460 and 470 are both named '<\|reserved_token_470\|>'",
        ),
    ],
)
def test_bad_config_is_refused(tmp_path, learned, config, message):
    write(tmp_path / "tiktoken.model", learned)
    (tmp_path / "tokenizer_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_directory(tmp_path)


# Reading the vocabulary file


def test_lines_may_come_in_any_order_and_with_windows_ends(tmp_path, learned, tokenizer):
    lines = vocabulary_lines(learned)
    (tmp_path / "m").write_bytes("\r\n".join(reversed(lines)).encode())
    assert Tokenizer.from_file(tmp_path / "m").encode(TRAINING_TEXT) == tokenizer.encode(TRAINING_TEXT)


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (300, "Zm9v", r"line 300: expected 'base64 rank', found 'Zm9v'"),
        (300, "", r"line 300: expected 'base64 rank', found ''"),
        (300, "Zm9v 299 1", r"line 300: expected 'base64 rank', found 'Zm9v 299 1'"),
        (1, "version https://git-lfs.github.com/spec/v1", r"line 1: 'version' is not base64"),
        (300, "Zm9 299", r"line 300: 'Zm9' is not base64"),
        (300, "Zm9v! 299", r"line 300: 'Zm9v!' is not base64"),
        (300, "Zm-_ 299", r"line 300: 'Zm-_' is not base64"),
        (300, "Zmé9 299", r"line 300: 'Zmé9' is not base64"),
        (300, "==== 299", r"line 300: '====' is not base64"),
        (300, "YWJjZA== -1", r"line 300: rank '-1' is not a whole number"),
        (300, "YWJjZA== 2_99", r"line 300: rank '2_99' is not a whole number"),
        (300, "YWJjZA== ٣", r"line 300: rank '٣' is not a whole number"),
        (300, "YWJjZA== 299.0", r"line 300: rank '299\.0' is not a whole number"),
        (300, "YWJjZA== " + "9" * 5000, r"line 300: rank '9{60}…' is not a whole number"),
        (300, "YWJjZA== 17", r"line 300: rank 17 is already taken by line 18"),
        (300, "QQ== 299", r"line 300: token b'A' already stands on line 66"),
        (300, "YWJjZA== 9999", r"line 301: rank 300, but no line has rank 299"),
        (457, "YWJjZA== 457", r"line 457: rank 457, but no line has rank 456"),
        (
            456,
            "YWJjZA== 4",
            r"line 456 \(unfinished: is the file cut short\?\): rank 4 is already taken by line 5",
        ),
        (
            456,
            "YWJj",
            r"line 456 \(unfinished: is the file cut short\?\): expected 'base64 rank', found 'YWJj'",
        ),
    ],
)
def test_bad_line_is_named(tmp_path, learned, number, line, message):
    lines = vocabulary_lines(learned)
    lines[number - 1 :] = [line, *lines[number:]]
    path = tmp_path / "tiktoken.model"
    path.write_text("\n".join(lines) + ("\n" if number != 456 else ""), encoding="utf-8")
    with pytest.raises(TokenizerError, match=re.escape(str(path)) + ": " + message):
        Tokenizer.from_file(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"m: the file is empty"),
        (b"\n \n", r"m: the file is empty"),
        (b"IQ== 0\nIg== 1\n\x80\x03}q\x00.", r"m: line 3: byte 0x80 is not UTF-8, so not a text file"),
        (b"\x00" * 100, r"m: line 1 \(unfinished.*\): expected 'base64 rank', found '\\x00"),
        (b"\xef\xbb\xbfIQ== 0\n", r"m: line 1: '\\ufeffIQ==' is not base64"),
    ],
)
def test_bad_file_is_named(tmp_path, data, message):
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_file(tmp_path / "m")


def test_missing_file_and_directory_in_its_place_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tiktoken\.model: no such file"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(TokenizerError, match=r"cannot be read: Is a directory"):
        Tokenizer.from_file(tmp_path)


def test_every_single_byte_must_have_a_token(tmp_path):
    path = write(tmp_path / "m", BYTES[:200])
    with pytest.raises(TokenizerError, match=r"m: 56 of the 256 single bytes have no token, first 0xc8.*line 200"):
        Tokenizer.from_file(path)


def test_file_cut_anywhere_is_refused(tmp_path, learned):
    """At the end of a line only the expected size tells; elsewhere the last line does."""
    data = ("\n".join(vocabulary_lines(learned)) + "\n").encode()
    path = tmp_path / "m"
    last_line = data[:-1].rindex(b"\n") + 1
    for end in [*range(0, last_line, 97), *range(last_line - 25, len(data) - 1)]:
        path.write_bytes(data[:end])
        with pytest.raises(TokenizerError, match=re.escape(str(path))):
            Tokenizer.from_file(path, expected_vocab_size=712)
    path.write_bytes(data[:last_line])
    assert Tokenizer.from_file(path).vocab_size == 711
    message = r"m: 455 base \+ 256 special tokens are 711, but the model's vocab_size is 712"
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_file(path, expected_vocab_size=712)


def test_nothing_else_in_the_directory_is_read(tmp_path, learned):
    write(tmp_path / "tiktoken.model", learned)
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit('executed')")
    (tmp_path / "special_tokens_map.json").write_text("not JSON")
    names_file(tmp_path, {})
    assert Tokenizer.from_directory(tmp_path).vocab_size == 712


# Chunks


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("", []),
        ("x", [1]),
        ("x" * 25_000, [25_000]),
        ("x" * 25_001, [25_000, 1]),
        (" " * 25_001, [25_000, 1]),
        ("x" * 50_000, [25_000, 25_000]),
        ("x" * 75_001, [25_000, 25_000, 25_000, 1]),
        # The run is counted from its own start; what stands before it stays in its chunk.
        ("ab " + "x" * 25_001, [25_003, 1]),
        ("x" * 25_000 + " " * 25_000 + "x" * 25_000, [75_000]),
        ("x" * 25_001 + " y", [25_000, 3]),
        # After a cut, the rest of a run and the next one share a chunk.
        ("x" * 25_001 + " " * 25_001 + "y", [25_000, 25_001, 2]),
        ("QUJDRA" * 5_000, [25_000, 5_000]),
        (" " * 30_000 + "end", [25_000, 5_003]),
        ("word " * 100_000, [400_000, 100_000]),
        # A run is counted anew in each block of 400,000.
        ("a " * 195_000 + "x" * 30_000, [400_000, 20_000]),
        ("x" * 400_000, [25_000] * 16),
        # Counted in characters, not bytes, and with what Python calls whitespace: U+001C is, U+200B is not.
        ("世" * 25_001, [25_000, 1]),
        ("\u3000\x1c\x85" * 8_334, [25_000, 2]),
        ("x" * 20_000 + "\x1f" + "x" * 20_000, [40_001]),
        ("x" * 20_000 + "\u200b" + "x" * 20_000, [25_000, 15_001]),
    ],
)
def test_where_chunks_end(text, lengths):
    chunks = list(split_chunks(text))
    assert [len(chunk) for chunk in chunks] == lengths
    assert "".join(chunks) == text


def walked_chunks(text, max_chars, max_run):
    """The published rule by single characters: a change of sort or a cut sets the counter back to one."""
    chunks = []
    for offset in range(0, len(text), max_chars):
        chunk, counted, sort = "", 0, None
        for character in text[offset : offset + max_chars]:
            counted = counted + 1 if character.isspace() == sort else 1
            sort = character.isspace()
            if counted > max_run:
                chunks.append(chunk)
                chunk, counted = "", 1
            chunk += character
        chunks.append(chunk)
    return chunks


@settings(deadline=None, max_examples=200)
@given(
    st.text(alphabet=[*"ab世 \n\t", "\u00a0", "\u1680", "\u180e", "\u2028", "\x1c", "\x85"], max_size=60),
    st.integers(1, 30),
    st.integers(1, 8),
)
def test_chunks_equal_a_walk_over_the_text(text, max_chars, max_run):
    assert list(split_chunks(text, max_chars, max_run)) == walked_chunks(text, max_chars, max_run)


def test_published_counts_that_need_no_real_vocabulary(tmp_path):
    tokenizer = with_tokens(tmp_path, "word", " word")
    assert len(tokenizer.encode("word " * 6_000)) == 6_001
    # One chunk would give 100,001.
    assert len(tokenizer.encode("word " * 100_000)) == 100_002


def test_no_token_reaches_over_a_cut(tmp_path):
    tokenizer = with_tokens(tmp_path, "xx")
    assert tokenizer.encode("x" * 25_002) == [256] * 12_501
    assert tokenizer.encode("." + "x" * 25_002) == [46, *[256] * 12_499, 120, 256, 120]


def test_marker_on_a_cut_is_text_as_published(tokenizer):
    assert tokenizer.special_id("<|open|>") in tokenizer.encode_structural("x" * 24_992 + "<|open|>")
    assert max(tokenizer.encode_structural("x" * 24_993 + "<|open|>")) < tokenizer.num_base


# Pieces


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("世界", ["世界"]),
        ("a世界b", ["a", "世界", "b"]),
        (" 世界", [" ", "世界"]),
        ("ア世", ["ア", "世"]),
        ("HelloWorld", ["Hello", "World"]),
        ("HTTPServer", ["HTTPServer"]),
        ("HTTP", ["HTTP"]),
        ("aB", ["a", "B"]),
        ("مرحبا", ["مرحبا"]),
        ("e\u0301a", ["e\u0301a"]),
        ("We'll", ["We'll"]),
        ("WE'LL", ["WE'LL"]),
        ("we'lla", ["we'll", "a"]),
        ("it'x", ["it", "'x"]),
        ("12345", ["123", "45"]),
        ("a1b", ["a", "1", "b"]),
        (" 1", [" ", "1"]),
        (" a", [" a"]),
        ("  a", [" ", " a"]),
        ("\ta", ["\ta"]),
        ("\na", ["\n", "a"]),
        ("?!a", ["?!", "a"]),
        (" ?!\n\na", [" ?!\n\n", "a"]),
        ("?\n a", ["?\n", " a"]),
        ("a \n\n  b", ["a", " \n\n", " ", " b"]),
        ("a   ", ["a", "   "]),
        ("<|open|>", ["<|", "open", "|>"]),
    ],
)
def test_split_pattern(tmp_path, text, pieces):
    """Though the whole text and each two neighbours are tokens too, only the pieces are found."""
    neighbours = [left + right for left, right in pairwise(pieces)]
    longer = {token for token in [text, *pieces, *neighbours] if len(token.encode()) > 1}
    tokenizer = with_tokens(tmp_path, *sorted(longer))
    assert [tokenizer.decode([id]) for id in tokenizer.encode(text)] == pieces


def test_merge_order_is_by_rank_not_by_length(tmp_path):
    tokenizer = with_tokens(tmp_path, "bc", "ab", "abcd", "cd")
    # "bc" ranks first, and neither a+bc nor bc+d is a token, so that "ab" and "cd" are never made.
    assert tokenizer.encode("abcde") == [97, 256, 100, 101]
    # A whole piece that is a token needs no merges that lead to it.
    assert tokenizer.encode("abcd") == [258]


# The two ways to encode


def test_content_never_holds_a_special_id(tokenizer):
    content = tokenizer.encode(MARKERS)
    assert max(content) < tokenizer.num_base
    assert tokenizer.decode(content) == MARKERS
    everything = " ".join(tokenizer.special_name(id) for id in range(tokenizer.num_base, tokenizer.vocab_size))
    assert max(tokenizer.encode(everything)) < tokenizer.num_base


def test_structural_text_holds_each_special_id(tokenizer):
    ids = tokenizer.encode_structural(MARKERS)
    assert [id for id in ids if tokenizer.is_special(id)] == [
        tokenizer.special_id("<|open|>"),
        tokenizer.end_of_msg_id,
        tokenizer.bos_id,
    ]
    assert tokenizer.decode(ids) == MARKERS
    # Text on both sides of a marker is split as if it stood alone.
    assert ids[: ids.index(tokenizer.special_id("<|open|>"))] == tokenizer.encode("literal ")


MIXED = st.text(
    alphabet=st.one_of(
        st.sampled_from(
            [
                *"abABsSlLtT'12 \t\r\n.!<|>[]",
                "世",
                "界",
                "é",
                "\u0301",
                "ʰ",
                "م",
                "ж",
                "Ж",
                "٣",
                "😀",
                "\u200d",
            ]
        ),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)
WITH_MARKERS = st.lists(st.one_of(MIXED, st.sampled_from(["<|open|>", "<|sep|>", "[BOS]", "<|reserved_token_463|>"])))


@settings(deadline=None, max_examples=200)
@given(WITH_MARKERS.map("".join))
@example("<|open|>\ud800<|sep|>")
def test_short_text_encodes_as_tiktoken_does(tokenizer, direct, text):
    assert tokenizer.encode(text) == direct.encode(text, disallowed_special=())
    assert tokenizer.encode_structural(text) == direct.encode(text, allowed_special="all")


@settings(deadline=None, max_examples=200)
@given(WITH_MARKERS.map("".join))
def test_decode_gives_back_what_was_encoded(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_structural(text)) == text
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


def test_long_text_decodes_to_itself(tokenizer):
    text = TRAINING_TEXT * 1_000
    assert len(text) > 400_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogate_becomes_the_replacement_character(tokenizer):
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")


@pytest.mark.parametrize("id", [-1, 712, 2**40])
def test_id_outside_the_vocabulary_is_named(tokenizer, id):
    message = rf"token id {id} is outside the vocabulary 0-711"
    with pytest.raises(TokenizerError, match=message):
        tokenizer.decode([65, id])
    with pytest.raises(TokenizerError, match=message):
        tokenizer.decode_bytes([id])
    with pytest.raises(TokenizerError, match=message):
        tokenizer.incremental_decoder().push(id)


def test_decoding_bytes_that_are_not_utf8(tokenizer):
    assert tokenizer.decode_bytes([0xF0, 0x9F]) == b"\xf0\x9f"
    assert tokenizer.decode([0xF0, 0x9F]) == "\ufffd"
    with pytest.raises(UnicodeDecodeError):
        tokenizer.decode([0xF0, 0x9F], errors="strict")


# Streaming


def streamed(tokenizer, ids):
    decoder = tokenizer.incremental_decoder()
    return [decoder.push(id) for id in ids] + [decoder.flush()]


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"ab", ["a", "b", ""]),
        ("é".encode(), ["", "é", ""]),
        ("世".encode(), ["", "", "世", ""]),
        ("😀".encode(), ["", "", "", "😀", ""]),
        # Cut after two of four bytes: one U+FFFD at the end, not two, and not before.
        ("😀".encode()[:2], ["", "", "\ufffd"]),
        # Cut, then ordinary text: only then is it certain that no character comes.
        ("😀".encode()[:2] + b"a", ["", "", "\ufffda", ""]),
        # A continuation byte alone can never become anything.
        (b"a\x80b", ["a", "\ufffd", "b", ""]),
        # 0xE0 0x80 is an overlong form: two errors as soon as the second byte is seen.
        (b"\xe0\x80a", ["", "\ufffd\ufffd", "a", ""]),
        (b"\xff", ["\ufffd", ""]),
        ("é".encode()[:1] + "世".encode(), ["", "\ufffd", "", "世", ""]),
    ],
)
def test_bytes_wait_only_while_they_can_become_a_character(tokenizer, data, parts):
    assert streamed(tokenizer, data) == parts
    assert "".join(parts) == tokenizer.decode(data)


@pytest.mark.parametrize(
    "text",
    ["👩‍👩‍👧‍👦 👍🏽 🇩🇪", "你好\uff0c世界\uff01我是 Kimi K3。", "e\u0301 กำ नमस्ते", "\ufffd is text too"],
)
def test_streaming_valid_text_byte_by_byte(tokenizer, text):
    data = text.encode()
    decoder = tokenizer.incremental_decoder()
    so_far = ""
    for count, byte in enumerate(data, 1):
        so_far += decoder.push(byte)
        # All that is whole is out, and no more.
        assert so_far == data[:count].decode(errors="ignore")
    assert decoder.flush() == ""


def test_special_token_in_the_middle_of_a_character(tokenizer):
    ids = [0xE4, 0xB8, tokenizer.end_of_msg_id, 0x96]
    assert streamed(tokenizer, ids) == ["", "", "\ufffd<|end_of_msg|>", "\ufffd", ""]
    assert tokenizer.decode(ids) == "\ufffd<|end_of_msg|>\ufffd"


def test_decoder_starts_afresh_after_flush(tokenizer):
    decoder = tokenizer.incremental_decoder()
    assert decoder.push(0xE4) + decoder.flush() == "\ufffd"
    assert decoder.push(0x41) + decoder.flush() == "A"


@settings(deadline=None, max_examples=300)
@given(st.lists(st.one_of(st.integers(0x80, 0xFF), st.integers(0, 711)), max_size=30))
def test_streamed_parts_join_to_the_full_decode(tokenizer, ids):
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


# Speed


@pytest.mark.parametrize("unit", ["a", "A", " ", "\n", " \n", "1", "世", "\u0301", "aB", "a'b'c", ".\x1f"])
def test_a_megabyte_of_one_thing_is_quick(tmp_path, unit):
    doubled = [unit * 2**power for power in range(5) if len((unit * 2**power).encode()) > 1]
    tokenizer = with_tokens(tmp_path, *doubled)
    text = unit * (1_000_000 // len(unit.encode()))
    started = time.perf_counter()
    ids = tokenizer.encode(text)
    assert time.perf_counter() - started < 5
    assert tokenizer.decode(ids) == text


def test_other_threads_run_while_text_is_encoded(tmp_path):
    """A server can encode in a worker thread without stopping its event loop."""
    tokenizer = with_tokens(tmp_path, *["a" * 2**power for power in range(1, 7)])
    worker = threading.Thread(target=tokenizer.encode, args=("a" * 2_000_000,))
    turns = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10


# The real vocabulary, which cannot be shipped. Kimi K2's tiktoken.model is the same file.


@pytest.fixture(scope="module")
def real():
    directory = os.environ.get("KIMI_K3_TOKENIZER")
    if directory is None:
        pytest.skip("KIMI_K3_TOKENIZER names no directory with K3's tiktoken.model")
    return Tokenizer.from_file(os.path.join(directory, "tiktoken.model"), expected_vocab_size=163_840)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            "The quick brown fox jumps over the lazy dog.",
            "1008 5072 16331 69275 60062 1312 276 29292 7751 13",
        ),
        ("你好\uff0c世界\uff01我是 Kimi K3。", "33845 378 2243 856 7808 24980 72 1040 18 292"),
        (
            "0 7 42 1234 999999 3.14159 1e-9",
            "15 220 22 220 5512 220 6694 19 220 11275 11275 220 18 13 18702 6276 220 16 68 12 24",
        ),
        (MARKERS, "82319 22652 4454 91 29 316 22652 517 5118 14222 91 29 316 793 33 4110 60 2397"),
    ],
)
def test_published_ids(real, text, ids):
    assert real.encode(text) == [int(id) for id in ids.split()]


def test_published_structural_ids(real):
    ids = [82319, 220, 163587, 316, 220, 163586, 316, 220, 163584, 2397]
    assert real.encode_structural(MARKERS) == ids


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("QUJDRA" * 5_000, 19_999),
        (" " * 30_000 + "end", 121),
        ("word " * 6_000, 6_001),
        ("word " * 100_000, 100_002),
    ],
)
def test_published_counts(real, text, count):
    assert len(real.encode(text)) == count
