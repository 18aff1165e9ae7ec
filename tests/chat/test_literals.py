"""Arguments of tool calls, from JSON text and from mappings."""

import json
from decimal import Decimal
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.chat.errors import ChatError
from kimi_jax.chat.literals import arguments_from_mapping, arguments_from_text, sorted_json


def read(source):
    members = arguments_from_text(source, "here")
    return None if members is None else [tuple(member) for member in members]


def test_source_text_of_values_is_kept():
    source = '{"s": "he said \\"hi\\" & left", "n": 1e2, "a": [1, 2,  3], "o": {"b": 2, "a": 1}}'
    assert read(source) == [
        ("s", "string", 'he said "hi" & left'),
        ("n", "number", "1e2"),
        ("a", "array", "[1, 2,  3]"),
        ("o", "object", '{"b": 2, "a": 1}'),
    ]


@pytest.mark.parametrize(
    ("literal", "kind"),
    [
        ("true", "boolean"),
        ("false", "boolean"),
        ("null", "null"),
        ("0", "number"),
        ("-0.0", "number"),
        ("1E+2", "number"),
        ("12345678901234567890123", "number"),
        ("9" * 5_000, "number"),
        ("NaN", "number"),
        ("Infinity", "number"),
        ("-Infinity", "number"),
        ('{"k":[1 , "\\u00e9"]}', "object"),
        ('[ "}" ]', "array"),
        ("[]", "array"),
    ],
)
def test_types_and_literals(literal, kind):
    expected = [("k", kind, literal), ("z", "null", "null")]
    assert read('{"k":' + literal + ',"z":null}') == expected
    assert read('\t{\n"k"\r: ' + literal + ' ,\n"z" :null }') == expected


@pytest.mark.parametrize(
    ("source", "members"),
    [
        ("", []),
        ("{}", []),
        (" { } ", []),
        ('{"a": 1, "a": 2, "a": 1}', [("a", "number", "1"), ("a", "number", "2"), ("a", "number", "1")]),
        ('{"a": 1} and more', [("a", "number", "1")]),
        ('{"a": 1}}', [("a", "number", "1")]),
        ('{"a\tb": "c\nd\x00"}', [("a\tb", "string", "c\nd\x00")]),
        ('{"": ""}', [("", "string", "")]),
        ('{"\\ud83d\\ude00": "\\u00e9\\/"}', [("😀", "string", "é/")]),
    ],
)
def test_objects_as_published(source, members):
    assert read(source) == members


@pytest.mark.parametrize(
    "source",
    [
        " ",
        "\n\t ",
        "[1]",
        '"text"',
        "5",
        "null",
        "{",
        '{"a"',
        '{"a":',
        '{"a":}',
        '{"a": 1',
        '{"a": 1,',
        '{"a": 1,}',
        '{"a": 01}',
        '{"a": tru}',
        '{"a": 1 "b": 2}',
        '{"a" 1}',
        "{a: 1}",
        "{'a': 1}",
        '{"a": "x}',
        '{"a": [1}',
        '{"a": [1,]}',
        '{"a": oops',
        '{"a": -}',
        '{"a": "\\x"}',
        '{5: "x"}',
        '\ufeff{"a": 1}',
        '\u00a0{"a": 1}',
    ],
)
def test_what_is_no_object(source):
    assert read(source) is None


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.text(max_size=4), VALUES), st.booleans(), st.sampled_from([None, 0, 3]), st.text(max_size=3))
def test_text_and_mapping_say_the_same(arguments, ascii_only, indent, behind):
    """Types agree, strings are equal, and every other literal reads back as the value."""
    source = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent) + behind
    from_text = arguments_from_text(source, "here")
    from_mapping = arguments_from_mapping(arguments, "here")
    assert [(a.key, a.type) for a in from_text] == [(a.key, a.type) for a in from_mapping]
    for ours, other, value in zip(from_text, from_mapping, arguments.values(), strict=True):
        if isinstance(value, str):
            assert ours.text == other.text == value
        else:
            assert repr(json.loads(ours.text)) == repr(json.loads(other.text)) == repr(value)


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet='{}[]":,\\ 1-+.eatrufNI\n', max_size=20))
def test_no_text_is_too_strange(source):
    """Whole JSON objects are read as Python reads them, and nothing but None comes of the rest."""
    members = arguments_from_text(source, "here")
    try:
        value = json.loads(source, strict=False)
    except ValueError:
        return
    assert (members is not None) == isinstance(value, dict)
    if members is not None:
        assert repr({member.key: value[member.key] for member in members}) == repr(value)


def test_mappings_use_spaces_and_no_escapes():
    frozen = MappingProxyType({"b": 1, "a": (True, MappingProxyType({"é": None}))})
    assert [tuple(a) for a in arguments_from_mapping(MappingProxyType({"z": frozen, "y": float("nan")}), "here")] == [
        ("z", "object", '{"b": 1, "a": [true, {"é": null}]}'),
        ("y", "number", "NaN"),
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({1: "x"}, "here: a key: found int 1, wanted a string"),
        ({"k": Decimal(1)}, r"here\['k'\]: (found|cannot)"),
        ({"k": [{1, 2}]}, r"here\['k'\]: cannot be written as JSON: values of type set"),
        ({"k": {(1, 2): 3}}, r"here\['k'\]: cannot be written as JSON: keys must be"),
    ],
)
def test_mappings_that_json_does_not_have(arguments, error):
    with pytest.raises(ChatError, match=error):
        arguments_from_mapping(arguments, "here")


def test_sorted_json():
    assert sorted_json({"b": [{"d": 1, "c": 2.0}], "a": "é\n"}, "here") == '{"a":"é\\n","b":[{"c":2.0,"d":1}]}'
    with pytest.raises(ChatError, match="here: cannot be written as JSON: '<' not supported"):
        sorted_json({"a": 1, 2: 3}, "here")
