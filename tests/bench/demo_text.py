"""Makes what the demo model is trained on: text, held-out text, and a small vocabulary in K3's format.

    apt-get install bible-kjv bible-kjv-text
    python tests/bench/demo_text.py build/demo-text

The text is the King James Version of 1611 (public domain) of Debian's package bible-kjv-text, source bible-kjv 4.38,
read with the package's own program. It is cut into chapters: a heading such as `Genesis 1`, then a verse a line. Every
`HELD_OUT`-th chapter goes to `heldout.txt`, the others to `train.txt`, an empty line between chapters. The vocabulary
is learned from `train.txt` alone.
"""

import argparse
import base64
import json
import re
import subprocess
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import regex

from kimi_jax.chat.tokenizer import NUM_SPECIAL, SPLIT_PATTERN, Tokenizer

HELD_OUT = 50
BASE_TOKENS = 1280


def chapters(program: str, folder: str) -> list[str]:
    """Every chapter: its heading and its verses, a line each, without their numbers."""
    command = [program, "-p", folder, "-l99999", "ge1:1-rev22:21"]
    printed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    found: list[list[str]] = []
    for line in filter(None, map(str.rstrip, printed.splitlines())):
        verse = re.fullmatch(r"\s+\d+ (.*)", line)
        if verse is None:
            found.append([line])
        else:
            found[-1].append(verse[1])
    return ["\n".join(lines) + "\n" for lines in found]


def learn_vocabulary(text: str, size: int) -> list[bytes]:
    """Byte-pair encoding: the 256 bytes, then again and again the most frequent pair of neighbours in a piece.

    Of pairs that are as frequent the one whose bytes sort first is taken.
    """
    pieces = Counter(regex.findall(SPLIT_PATTERN, text, flags=regex.V1))
    words = [[bytes([byte]) for byte in piece.encode()] for piece in pieces]
    counts = list(pieces.values())
    pairs: Counter[tuple[bytes, bytes]] = Counter()
    places: defaultdict[tuple[bytes, bytes], set[int]] = defaultdict(set)

    def count(number: int, sign: int) -> None:
        for pair in pairwise(words[number]):
            pairs[pair] += sign * counts[number]
            places[pair].add(number)

    for number in range(len(words)):
        count(number, 1)
    tokens = {bytes([byte]): None for byte in range(256)}
    while len(tokens) < size:
        best = max(pairs, key=lambda pair: (pairs[pair], [-byte for byte in pair[0] + pair[1]]))
        tokens[best[0] + best[1]] = None
        for number in places.pop(best):
            count(number, -1)
            words[number] = merged(words[number], best)
            count(number, 1)
        del pairs[best]
    return list(tokens)


def merged(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """The word with every occurrence of the pair made one token, from the left."""
    out: list[bytes] = []
    for token in word:
        if out and (out[-1], token) == pair:
            out[-1] += token
        else:
            out.append(token)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--program", default="bible", help="the program of the package bible-kjv")
    parser.add_argument("--data", default="/usr/lib", help="folder of the package's bible.data")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = chapters(options.program, options.data)
    held_out = found[HELD_OUT - 1 :: HELD_OUT]
    train = [chapter for number, chapter in enumerate(found, 1) if number % HELD_OUT]
    for name, part in (("train", train), ("heldout", held_out)):
        (options.out / f"{name}.txt").write_text("\n".join(part), encoding="utf-8")
    tokens = learn_vocabulary("\n".join(train), BASE_TOKENS)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (options.out / "tiktoken.model").write_text("".join(lines))
    (options.out / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {}}) + "\n")
    tokenizer = Tokenizer.from_directory(options.out, expected_vocab_size=BASE_TOKENS + NUM_SPECIAL)
    for name, part in (("train", train), ("heldout", held_out)):
        text = "\n".join(part)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        size = len(text.encode())
        rate = size / len(ids)
        print(f"{name}.txt: {len(part)} chapters, {size:,} bytes, {len(ids):,} tokens of {rate:.2f} bytes")


if __name__ == "__main__":
    main()
