"""Python functions as tools."""

import enum
import json
import sys
from typing import Annotated, Any, Dict, Literal  # noqa: UP035 (people still write it)

import pytest

from kimi_jax.chat.tools import ToolError, load_tool, make_tool


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", *, near: list[float] | None = None) -> dict:
    """Tells the weather.

    As of now.
    """
    return {"city": city, "days": days, "unit": unit, "near": near}


def test_declaration():
    assert make_tool(weather).declaration == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.\n\nAs of now.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"enum": ["C", "F"]},
                    "near": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
                },
                "required": ["city"],
            },
        },
    }


def test_described_parameters_and_other_types():
    def find(
        where: Annotated[dict[str, bool], "which places"], anything: Any, rest: list, none: None, flag: bool = True
    ):
        pass

    declared = make_tool(find).declaration["function"]
    assert "description" not in declared
    assert declared["parameters"]["properties"] == {
        "where": {"type": "object", "additionalProperties": {"type": "boolean"}, "description": "which places"},
        "anything": {},
        "rest": {"type": "array"},
        "none": {"type": "null"},
        "flag": {"type": "boolean"},
    }
    assert declared["parameters"]["required"] == ["where", "anything", "rest", "none"]


def test_calls():
    tool = make_tool(weather)
    assert json.loads(tool.call('{"city": "Köln", "near": [1, 2.5]}')) == {
        "city": "Köln", "days": 1, "unit": "C", "near": [1, 2.5],
    }  # fmt: skip
    assert "ö" in tool.call('{"city": "Köln"}')
    assert make_tool(lambda_like).call('{"text": "as it is"}') == "as it is"


def lambda_like(text: str) -> str:
    return text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"city": ', "are no JSON"),
        ("[" * 100_000, "are no JSON"),
        ("[1]", "must be a JSON object, found list"),
        ("{}", "missing a required argument: 'city'"),
        ('{"city": "x", "when": 1}', "unexpected keyword argument 'when'"),
        ('{"city": 3}', 'city must be {"type": "string"}, found 3'),
        ('{"city": "x", "days": true}', "found true"),
        ('{"city": "x", "days": 1.5}', "found 1.5"),
        ('{"city": "x", "unit": "K"}', 'found "K"'),
        ('{"city": "x", "near": [1, "2"]}', 'found [1, "2"]'),
    ],
)
def test_calls_that_do_not_fit(arguments, said):
    with pytest.raises(ToolError) as error:
        make_tool(weather).call(arguments)
    assert str(error.value).startswith("weather: ")
    assert said in str(error.value)


class Colour(enum.Enum):
    RED = 1


def test_functions_that_cannot_be_tools():
    def bare(x):
        pass

    def many(*x: int):
        pass

    def odd(x: complex):
        pass

    def dictionary(x: Dict):  # noqa: UP006
        pass

    def elsewhere(x: "json.Nope"):
        pass

    def unwritten(x: "1x"):
        pass

    def unhashable(x: Literal[[1]]):
        pass

    def raw(x: Literal["a", b"b"]):
        pass

    def colour(x: Literal[Colour.RED]):
        pass

    def also(x: list[Literal[2**70, True, None, "a"]]):
        pass

    async def later(x: int):
        pass

    async def stream(x: int):
        yield x

    def several(x: int):
        yield x

    assert make_tool(also).declaration["function"]["parameters"]["properties"]["x"] == {
        "type": "array",
        "items": {"enum": [2**70, True, None, "a"]},
    }
    for function, said in [
        (dictionary, "'x': typing.Dict is no type that JSON has"),
        (elsewhere, "elsewhere: its annotations cannot be read: AttributeError"),
        (unwritten, "unwritten: its annotations cannot be read: SyntaxError"),
        (unhashable, r"'x': \[1\] in a Literal"),
        (raw, "b'b' in a Literal"),
        (colour, "Colour.RED.* in a Literal"),
        (later, "later is an async function"),
        (stream, "stream is an async function"),
        (several, "several is a generator"),
        (print, "cannot be (read|given)"),
        (bare, "'x' has no annotation"),
        (many, "'x' cannot be given by name"),
        (odd, "no type that JSON has"),
        (lambda: None, "has no name"),
    ]:
        with pytest.raises(ToolError, match=said):
            make_tool(function)


def test_from_a_file(tmp_path):
    file = tmp_path / "my_tools.py"
    file.write_text('def double(number: float) -> float:\n    "Twice."\n    return 2 * number\nvalue = 3\n')
    tool = load_tool(f"{file}:double")
    assert (tool.name, tool.call('{"number": 2.5}')) == ("double", "5.0")
    (tmp_path / "broken.py").write_text("def")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(3)\n")
    for source, said in [
        (str(file), "names no tool"),
        (f"{file}:", "names no tool"),
        (f"{tmp_path / 'none.py'}:x", "is not a file"),
        (f"{file}:value", "defines no function 'value'"),
        (f"{tmp_path / 'broken.py'}:x", "SyntaxError"),
        (f"{tmp_path / 'ends.py'}:x", "SystemExit: 3"),
    ]:
        with pytest.raises(ToolError, match=said):
            load_tool(source)


def test_a_file_is_run_once(tmp_path):
    """Two tools share what the file keeps, by whatever way the file is named."""
    (tmp_path / "counter.py").write_text(
        "seen = []\ndef add(word: str) -> None:\n    seen.append(word)\ndef words() -> list:\n    return seen\n"
    )
    add = load_tool(f"{tmp_path / 'counter.py'}:add")
    words = load_tool(f"{tmp_path / '..' / tmp_path.name / 'counter.py'}:words")
    add.call('{"word": "hey"}')
    assert words.call("{}") == '["hey"]'


def test_a_file_may_hold_what_a_module_holds(tmp_path):
    """Dataclasses under postponed annotations, and imports from its own folder, which stays on the path no longer."""
    (tmp_path / "beside_the_tools.py").write_text("FACTOR = 3\n")
    (tmp_path / "kept.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from beside_the_tools import FACTOR\n"
        "@dataclass\nclass Pair:\n    left: int = FACTOR\n"
        "def scale(number: int) -> int:\n    return number * Pair().left\n"
    )
    before = list(sys.path)
    try:
        assert load_tool(f"{tmp_path / 'kept.py'}:scale").call('{"number": 2}') == "6"
    finally:
        sys.modules.pop("beside_the_tools", None)
    assert sys.path == before


def test_a_file_that_failed_is_run_again(tmp_path):
    file = tmp_path / "mended.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        load_tool(f"{file}:now")
    file.write_text("def now() -> str:\n    return 'whole'\n")
    assert load_tool(f"{file}:now").call("{}") == "whole"
