"""The error of a conversation that cannot be written as a prompt, and how it shows what it found."""

MAX_SHOWN_CHARS = 60


class ChatError(ValueError):
    """A message, tool or option that cannot be rendered.

    Its text names the place (`messages[3].tool_calls[0].function.name`), what was found there and what is wanted.
    """


def found(value: object) -> str:
    """Describes a value for an error: short texts and plain values themselves, of others only the type."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_SHOWN_CHARS else value[:MAX_SHOWN_CHARS] + "…")
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64):
        return f"{type(value).__name__} {value!r}"
    return f"a value of type {type(value).__name__}"


def wrong(where: str, value: object, wanted: str) -> ChatError:
    """The error that says: at `where` stands `value`, but `wanted` should."""
    return ChatError(f"{where}: found {found(value)}, wanted {wanted}")
