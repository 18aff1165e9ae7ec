"""Python functions as tools."""

import json
from typing import Annotated, Any, Literal

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


def test_functions_that_cannot_be_tools():
    def bare(x):
        pass

    def many(*x: int):
        pass

    def odd(x: complex):
        pass

    for function, said in [
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
    for source, said in [
        (str(file), "names no tool"),
        (f"{file}:", "names no tool"),
        (f"{tmp_path / 'none.py'}:x", "is not a file"),
        (f"{file}:value", "defines no function 'value'"),
        (f"{tmp_path / 'broken.py'}:x", "SyntaxError"),
    ]:
        with pytest.raises(ToolError, match=said):
            load_tool(source)
