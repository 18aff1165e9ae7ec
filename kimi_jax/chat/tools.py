"""Python functions as tools: their declarations from annotations, and calls with the arguments that a model wrote."""

import hashlib
import importlib.util
import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_VALUES = (str, int, bool, type(None))
"""What a Literal may hold: a value is compared with what JSON says, type and all."""


class ToolError(ValueError):
    """A function that cannot be offered as a tool, or a call that does not fit it."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    - `declaration`: what the prompt says of it, in OpenAI's shape.
    """

    name: str
    function: Callable[..., Any]
    declaration: dict[str, Any]

    def call(self, arguments: str) -> str:
        """Calls the function with `arguments`, the text of a JSON object, and returns its result as text.

        A result that is no text is written as JSON. **Raises:** `ToolError` where the arguments do not fit the
        function; what the function raises goes on to the caller.
        """
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ToolError(f"{self.name}: the arguments are no JSON: {error}") from None
        if not isinstance(given, dict):
            raise ToolError(f"{self.name}: the arguments must be a JSON object, found {type(given).__name__}")
        try:
            bound = inspect.signature(self.function).bind(**given)
        except TypeError as error:
            raise ToolError(f"{self.name}: {error}") from None
        properties = self.declaration["function"]["parameters"]["properties"]
        for key, value in given.items():
            _check(self.name, key, value, properties.get(key, {}))
        result = self.function(*bound.args, **bound.kwargs)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def make_tool(function: Callable[..., Any]) -> Tool:
    """A tool whose parameters are those of `function`, by its annotations, and whose description is its docstring.

    Annotations may be `str`, `int`, `float`, `bool`, `None`, `list[…]`, `dict[str, …]`, `Literal[…]`, unions of these,
    and `Annotated[…, "what it is"]`. A Literal holds `str`, `int`, `bool` or `None`. A parameter without a default is
    required.

    **Raises:** `ToolError` naming the parameter that cannot be declared; also for a coroutine function or a generator,
    whose call gives no result.
    """
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise ToolError(f"{function!r} has no name to be called by")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ToolError(f"{name} is an async function; a tool is called without an event loop and must be a plain one")
    if inspect.isgeneratorfunction(function):
        raise ToolError(f"{name} is a generator; a tool must return its result, not yield it")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
    except Exception as error:  # annotations are the user's program
        raise ToolError(f"{name}: its annotations cannot be read: {type(error).__name__}: {error}") from error
    properties: dict[str, Any] = {}
    required = []
    for key, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolError(f"{name}: parameter {key!r} cannot be given by name")
        if key not in hints:
            raise ToolError(f"{name}: parameter {key!r} has no annotation; write for instance {key}: str")
        where = f"{name}: parameter {key!r}"
        try:
            properties[key] = _schema(where, hints[key])
        except ToolError:
            raise
        except Exception as error:  # an annotation that has no hash, or is nested without end
            raise ToolError(f"{where} cannot be declared: {type(error).__name__}: {error}") from error
        if parameter.default is parameter.empty:
            required.append(key)
    declared: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    described: dict[str, Any] = {"name": name, "parameters": declared}
    text = inspect.getdoc(function)
    if text:
        described["description"] = text
    return Tool(name, function, {"type": "function", "function": described})


def load_tool(source: str) -> Tool:
    """The tool of `FILE.py:FUNCTION`.

    The file is run, once in a process however many tools are taken from it; until it has run, its folder is where
    modules are found first. **Raises:** `ToolError` naming what is not there, or what the file raised.
    """
    path, colon, name = source.rpartition(":")
    file = Path(path)
    if not colon or not name or file.suffix != ".py":
        raise ToolError(f"{source!r} names no tool; write it like tools.py:function")
    if not file.is_file():
        raise ToolError(f"{file} is not a file")
    module = _module(file)
    function = getattr(module, name, None)
    if not callable(function):
        raise ToolError(f"{file} defines no function {name!r}")
    return make_tool(function)


def _module(file: Path) -> types.ModuleType:
    """The module of a file, from `sys.modules` where it is already, by a name that no import asks for."""
    place = file.resolve()
    name = "_kimi_jax_tools_" + hashlib.sha256(os.fsencode(place)).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(place.parent)
    sys.modules[name] = module  # dataclasses look their module up there
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # it is the user's program
        del sys.modules[name]
        raise ToolError(f"{file}: {type(error).__name__}: {error}") from error
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)
    return module


def _schema(where: str, hint: Any) -> dict[str, Any]:
    """The JSON Schema of an annotation."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        told = " ".join(extra for extra in arguments[1:] if isinstance(extra, str))
        return _schema(where, arguments[0]) | ({"description": told} if told else {})
    if origin is Literal:
        for value in arguments:
            if type(value) not in _VALUES:
                raise ToolError(f"{where}: {value!r} in a Literal is no str, int, bool or None")
        return {"enum": list(arguments)}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(where, each) for each in arguments]}
    if hint is list or origin is list:
        return {"type": "array"} | ({"items": _schema(where, arguments[0])} if arguments else {})
    if hint is dict or (origin is dict and arguments and arguments[0] is str):
        return {"type": "object"} | ({"additionalProperties": _schema(where, arguments[1])} if arguments else {})
    if hint is Any:
        return {}
    raise ToolError(f"{where}: {hint!r} is no type that JSON has; use str, int, float, bool, list, dict or Literal")


def _check(name: str, key: str, value: Any, schema: Mapping[str, Any]) -> None:
    """Refuses a value whose JSON type is not the declared one: a model's mistake becomes its tool's answer."""
    if not _fits(value, schema):
        raise ToolError(f"{name}: {key} must be {json.dumps(schema)}, found {json.dumps(value)[:80]}")


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return isinstance(value, list) and all(_fits(each, schema.get("items", {})) for each in value)
    if kind == "object":
        inner = schema.get("additionalProperties", {})
        return isinstance(value, dict) and all(_fits(each, inner) for each in value.values())
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and kind == "number")
        return whole and not isinstance(value, bool)
    simple = {"string": str, "boolean": bool, "null": type(None)}
    return kind is None or isinstance(value, simple[kind])
