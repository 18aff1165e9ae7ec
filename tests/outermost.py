"""The type checker of the tests: beartype, but not for functions inside functions.

Those are made anew at every call of the outer one, and beartype takes milliseconds to decorate each. Their arguments
are arrays without shapes.
"""

from beartype import beartype


def check(function):
    """`function` with its annotations checked at every call, or as it is where it stands inside another."""
    return function if "<locals>" in getattr(function, "__qualname__", "") else beartype(function)
