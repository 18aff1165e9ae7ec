"""`kimi-jax tokens`: what a conversation costs."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from kimi_jax.chat.counting import Call, MessageCount, Prices, calls_of, count_messages, further_calls
from kimi_jax.chat.options import request_options
from kimi_jax.chat.render import ChatError
from kimi_jax.chat.tokenizer import Tokenizer
from kimi_jax.cli.output import CommandError, UsageError, console, print_table

TOKENIZER_VARIABLE = "KIMI_K3_TOKENIZER"
MOST_TURNS = 100_000
PARTS = ("content", "reasoning", "tool calls", "tool result", "image", "markup")


@dataclass(frozen=True)
class Tokens:
    """Count the tokens of a conversation by message and part, and what a whole agent run costs: each assistant message
    is one call, which sends everything before it again.

    The file is JSON: a list of messages, or an object with messages and perhaps tools, effort, tool_choice and
    response_format, as an OpenAI-style request has them.
    """

    file: tyro.conf.Positional[Path]
    """The conversation."""
    tokenizer: Path | None = None
    """A directory with tiktoken.model; by default the one that the variable KIMI_K3_TOKENIZER names."""
    input_price: float = Prices.input
    """Dollars a million tokens of new input."""
    cached_price: float = Prices.cached
    """Dollars a million tokens of input that an earlier call sent or received."""
    output_price: float = Prices.output
    """Dollars a million tokens of output."""
    turns: int | None = None
    """Also the cost of a run of so many calls like those of the file."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        """Counts and prints."""
        prices = Prices(self.input_price, self.cached_price, self.output_price)
        if not all(math.isfinite(price) and price >= 0 for price in asdict(prices).values()):
            raise UsageError("a price must be a number of dollars, not below 0")
        if self.turns is not None and not 1 <= self.turns <= MOST_TURNS:
            raise UsageError(f"--turns must lie between 1 and {MOST_TURNS:,}, found {self.turns}")
        messages, options = read_conversation(self.file)
        tokenizer = self._tokenizer()
        try:
            counts = count_messages(messages, tokenizer, **options)
            calls = calls_of(counts)
        except ChatError as error:
            raise CommandError(f"{self.file}: {error}") from None
        try:
            more = () if self.turns is None else further_calls(calls, self.turns)
        except ValueError as error:
            raise CommandError(f"{self.file}: --turns: {error}") from None
        if self.json:
            print(json.dumps(_report(counts, calls, more, prices), indent=2))
        else:
            _print(counts, calls, more, prices)

    def _tokenizer(self) -> Tokenizer:
        directory = self.tokenizer or os.environ.get(TOKENIZER_VARIABLE)
        if not directory:
            raise UsageError(f"give --tokenizer, a directory with tiktoken.model, or set {TOKENIZER_VARIABLE}")
        return Tokenizer.from_directory(Path(directory))


def read_conversation(file: Path) -> tuple[list[Any], dict[str, Any]]:
    """The messages of a file and the options beside them. **Raises:** `CommandError` naming what is wrong."""
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise CommandError(f"{file}: not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{file}: not JSON: {error}") from None
    if isinstance(found, list):
        found = {"messages": found}
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list):
        raise CommandError(f"{file}: wanted a list of messages, or an object with one as 'messages'")
    try:
        return messages, request_options(found)
    except ChatError as error:
        raise CommandError(f"{file}: {error}") from None


def _sums(calls: Sequence[Call], prices: Prices) -> dict[str, int | float]:
    return {
        "calls": len(calls),
        "cached": sum(call.cached for call in calls),
        "new": sum(call.new for call in calls),
        "output": sum(call.output for call in calls),
        "thinking": sum(call.thinking for call in calls),
        "dollars": sum(prices.cost(call) for call in calls),
        "thinking_dollars": sum(prices.thinking(call) for call in calls),
    }


def _report(
    counts: Sequence[MessageCount], calls: Sequence[Call], more: Sequence[Call], prices: Prices
) -> Mapping[str, Any]:
    report: dict[str, Any] = {
        "messages": [asdict(count) | {"tokens": count.tokens} for count in counts],
        "tokens": sum(count.tokens for count in counts),
        "prices": asdict(prices),
        "calls": [asdict(call) | {"dollars": prices.cost(call)} for call in calls],
        "total": _sums(calls, prices),
    }
    return report | ({"turns": _sums(more, prices)} if more else {})


def _print(counts: Sequence[MessageCount], calls: Sequence[Call], more: Sequence[Call], prices: Prices) -> None:
    out = console()
    rows: list[list[str | int]] = []
    for count in counts:
        shown = {part: count.parts.get(part, 0) for part in PARTS}
        other = count.tokens - sum(shown.values())  # an added message is all of one part
        name = "–" if count.message is None else str(count.message)
        rows.append([name, count.role, *shown.values(), other, count.tokens])
    rows.append(["", "all", *(sum(int(row[i]) for row in rows) for i in range(2, len(PARTS) + 4))])
    print_table(out, "Tokens by message", ("message", "role", *PARTS, "added", "all"), rows)
    if not calls:
        return
    lines: list[list[str | int]] = [
        [
            str(number),
            "the next" if call.message is None else str(call.message),
            call.cached,
            call.new,
            call.output,
            call.thinking,
            f"{prices.cost(call):.6f}",
        ]
        for number, call in enumerate(calls, 1)
    ]
    sums = _sums(calls, prices)
    totals = [int(sums[key]) for key in ("cached", "new", "output", "thinking")]
    lines.append(["all", "", *totals, f"{sums['dollars']:.6f}"])
    columns = ("call", "answer", "cached input", "new input", "output", "of input: earlier thinking", "dollars")
    print_table(out, "Calls of the run", columns, lines)
    out.print(
        f"Prices a million tokens: ${prices.input:g} input, ${prices.cached:g} cached input, ${prices.output:g} output."
    )
    out.print(
        f"Earlier thinking, sent back: {sums['thinking']:,} tokens of input over {len(calls)} calls, "
        f"${sums['thinking_dollars']:.6f} as cached input; {calls[-1].thinking:,} in the last."
    )
    if more:
        end = _sums(more, prices)
        out.print(
            f"A run of {len(more)} calls like these: {end['cached']:,} cached input, {end['new']:,} new, "
            f"{end['output']:,} output, ${end['dollars']:.4f}."
        )
