"""Which tool result answers which call.

Prompts hold no ids of calls: a result is known by its tool's name and its number. So the results that follow an
assistant message are put into the order of its calls, by the ids that they carry.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kimi_jax.chat.errors import ChatError, wrong


class Call(NamedTuple):
    """A tool call of an assistant message, as far as results are concerned."""

    id: str | None
    name: str


def optional_text(value: object, where: str) -> str | None:
    """A text or None as it is; `ChatError` for anything else."""
    if value is not None and not isinstance(value, str):
        raise wrong(where, value, "a string")
    return value


def calls_of(message: Mapping[str, Any], where: str) -> list[Call]:
    """The ids and names of an assistant message's tool calls, checked."""
    calls = []
    given = message.get("tool_calls")
    if given is not None and (not isinstance(given, Sequence) or isinstance(given, (str, bytes))):
        raise wrong(f"{where}.tool_calls", given, "a list of tool calls")
    for number, call in enumerate(given or ()):
        place = f"{where}.tool_calls[{number}]"
        if not isinstance(call, Mapping):
            raise wrong(place, call, "a mapping with `id` and `function`")
        if call.get("type", "function") not in (None, "function"):
            raise wrong(f"{place}.type", call["type"], "'function', the only type K3 knows")
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise wrong(f"{place}.function", function, "a mapping with `name` and `arguments`")
        if not isinstance(function.get("name"), str):
            raise wrong(f"{place}.function.name", function.get("name"), "a string")
        calls.append(Call(optional_text(call.get("id"), f"{place}.id"), function["name"]))
    return calls


def ordered_results(
    results: Sequence[tuple[int, Mapping[str, Any]]], calls: Sequence[Call], first: int
) -> list[tuple[int, str]]:
    """Puts a run of consecutive tool messages into the order of the calls and names their tools.

    Each is matched by `tool_call_id`, else `id`, and gets the name of its call. Where several calls have one id,
    which they should not, results take them in turn. If any result matches no call the run stays as it is, and each
    is named by its `tool`, else its `name`, else the call at its number.

    **Arguments:**

    - `results`: index and message of each.
    - `calls`: the last assistant message's.
    - `first`: the number, from 1, of the run's first result since that message.

    **Returns:** index and tool name of each message, in the order of the prompt.

    **Raises:** `ChatError` for a result whose tool cannot be told.
    """
    positions: dict[str, list[int]] = {}
    for position, call in enumerate(calls):
        if call.id:
            positions.setdefault(call.id, []).append(position)
    matched: list[tuple[int, int]] = []
    for index, message in results:
        where = f"messages[{index}]"
        call_id = optional_text(message.get("tool_call_id"), f"{where}.tool_call_id")
        candidates = positions.get(call_id or optional_text(message.get("id"), f"{where}.id") or "")
        if candidates:
            matched.append((candidates[0] if len(candidates) == 1 else candidates.pop(0), index))
    if len(matched) == len(results):
        return [(index, calls[position].name) for position, index in sorted(matched)]
    return [(index, _own_name(index, message, calls, first + n)) for n, (index, message) in enumerate(results)]


def _own_name(index: int, message: Mapping[str, Any], calls: Sequence[Call], number: int) -> str:
    where = f"messages[{index}]"
    name = optional_text(message.get("tool"), f"{where}.tool") or optional_text(message.get("name"), f"{where}.name")
    if name:
        return name
    if number <= len(calls):
        return calls[number - 1].name
    raise ChatError(
        f"{where}: tool result {number} after an assistant message with {len(calls)} tool calls, found neither a "
        f"name nor the id of one of those calls, wanted one of them: set `tool_call_id` or `name`"
    )
