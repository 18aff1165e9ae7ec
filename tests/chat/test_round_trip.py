"""Messages to prompts, read as if the model had generated them, and back to prompts: the same ids."""

import json

import pytest
from chat_outputs import BYTEWISE, MERGED, NAMES, TOKENIZERS, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.chat.render import build_segments, segments_ids, segments_text

QUESTION = {"role": "user", "content": "q"}

SPECIAL = st.sampled_from([*'"&<>\\/={}[]:, \n\tab', *NAMES, "&quot;", "世", "👋"])
TEXT = st.lists(st.one_of(SPECIAL, st.characters(codec="utf-8")), max_size=8).map("".join)
VALUES = st.recursive(
    st.one_of(TEXT, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=4)
LAYOUTS = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])
ARGUMENTS = st.one_of(
    OBJECTS, st.builds(lambda value, layout: json.dumps(value, **layout), OBJECTS, LAYOUTS), st.just("")
)
CALLS = st.lists(st.tuples(TEXT.filter(bool), ARGUMENTS), max_size=3)


def called(name, arguments):
    return {"id": None, "type": "function", "function": {"name": name, "arguments": arguments}}


def prompt_ids(message, tokenizer, thinking):
    options = {"thinking": thinking, "add_generation_prompt": False}
    return segments_ids(build_segments([QUESTION, message], **options), tokenizer)


def parsed(ids, tokenizer, thinking):
    """The parser after what follows the generation prompt."""
    prompt = segments_ids(build_segments([QUESTION], thinking=thinking), tokenizer)
    assert ids[: len(prompt)] == prompt
    return parse(ids[len(prompt) :], tokenizer=tokenizer, thinking=thinking)


def as_json(arguments):
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


@settings(deadline=None, max_examples=80)
@given(TEXT, TEXT, CALLS, st.booleans(), st.sampled_from([BYTEWISE, MERGED]))
def test_prompt_to_message_to_prompt(reasoning, content, calls, thinking, tokenizer):
    message = {"role": "assistant", "reasoning_content": reasoning, "content": content}
    message["tool_calls"] = [called(*call) for call in calls]
    ids = prompt_ids(message, tokenizer, thinking)
    parser = parsed(ids, tokenizer, thinking)
    assert parser.complete
    assert parser.message.get("reasoning_content", "") == (reasoning if thinking else "")
    assert parser.message["content"] == content
    made = [call["function"] for call in parser.message.get("tool_calls", [])]
    assert [(call["name"], json.loads(call["arguments"])) for call in made] == [
        (name, as_json(arguments)) for name, arguments in calls
    ]
    assert prompt_ids(parser.message, tokenizer, thinking) == ids


@TOKENIZERS
@pytest.mark.parametrize(
    "arguments",
    [
        '{"s": "he said \\"hi\\" & left", "n": 1e2, "a": [1, 2,  3], "o": {"b": 2, "a": 1}}',
        ' {"a" : 1 , "a" : "2" ,\n"a" : [\n3 ] } trailing',
        '{"n": 0.10, "m": -0, "e": 1E+2}',
        '{"s": "\\ud83d\\ude00 \\u00e9", "l": ["\\ud83d\\ude00", "\\ud800"]}',
    ],
)
def test_values_stay_as_they_were_written(tokenizer, arguments):
    ids = prompt_ids({"role": "assistant", "content": None, "tool_calls": [called("f", arguments)]}, tokenizer, True)
    message = parsed(ids, tokenizer, True).message
    assert prompt_ids(message, tokenizer, True) == ids


@pytest.mark.parametrize("arguments", ['{"x": NaN}', '{"x": ["a\nb"]}', '{"command": oops'])
def test_what_is_not_json_becomes_a_string_once(arguments):
    """The renderer takes it, but arguments that the parser gives are always JSON; the text itself stays."""
    ids = prompt_ids({"role": "assistant", "content": None, "tool_calls": [called("f", arguments)]}, BYTEWISE, True)
    message = parsed(ids, BYTEWISE, True).message
    [value] = json.loads(message["tool_calls"][0]["function"]["arguments"]).values()
    assert value == arguments.removeprefix('{"x": ').removesuffix("}")
    again = prompt_ids(message, BYTEWISE, True)
    assert again != ids
    assert parsed(again, BYTEWISE, True).message == message


def test_ids_name_the_calls_that_results_belong_to():
    """In any order, and though two calls are of one tool."""
    calls = [called("now", ""), called("now", ""), called("f", '{"a": 1}')]
    ids = prompt_ids({"role": "assistant", "content": "", "tool_calls": calls}, BYTEWISE, True)
    message = parsed(ids, BYTEWISE, True).message
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": str(number)}
        for number, call in enumerate(message["tool_calls"])
    ]
    prompts = [build_segments([QUESTION, message, *order]) for order in (results, results[::-1])]
    texts = [segments_text(prompt) for prompt in prompts]
    assert texts[0] == texts[1]
    assert 'tool="now" index="2"<|sep|>1<|close|>' in texts[0]
