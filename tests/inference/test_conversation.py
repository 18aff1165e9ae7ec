"""A conversation's cache from turn to turn, held to generation from the whole prompt."""

import numpy as np
import pytest
from two_layers import two_layers

import kimi_jax as kj
from kimi_jax.inference.conversation import ContextFullError, Conversation

pytestmark = pytest.mark.xdist_group("conversation")  # which shares its compiled functions
PROMPT = [5, 301, 17, 44, 9]


@pytest.fixture
def model(tiny):
    return two_layers(tiny("tiny-kimi-linear"))


def whole(model, prompt, count):
    return kj.generate(model, [prompt], max_new_tokens=count, stop_ids=[])[0]


def test_turns_equal_generation_from_the_whole(model):
    talk = Conversation(model, 200)
    first = list(talk.answer(PROMPT, [], 6))
    assert first == whole(model, PROMPT, 6)
    assert talk.prefilled == len(PROMPT)
    longer = PROMPT + first + [7, 8, 9]
    second = list(talk.answer(longer, [], 4))
    assert second == whole(model, longer, 4)
    assert talk.prefilled == 4  # three new ones, and the last answer's last, which was only said
    assert talk.ids == longer + second[:-1]


def test_another_beginning_starts_again(model):
    talk = Conversation(model, 200)
    list(talk.answer(PROMPT, [], 3))
    other = [5, 300, 17, 44, 9, 2]
    assert list(talk.answer(other, [], 3)) == whole(model, other, 3)
    assert talk.prefilled == len(other)
    assert list(talk.answer(other[:3], [], 3)) == whole(model, other[:3], 3)  # shorter than what is held


def test_an_answer_can_be_given_again(model):
    """The states are those behind the last prompt; the latents of the first answer are written over."""
    talk = Conversation(model, 200)
    first = list(talk.answer(PROMPT, [], 6))
    assert list(talk.answer(PROMPT, [], 6)) == first
    assert talk.prefilled == 0
    other = [*PROMPT, first[0], 511 - first[1], 3]
    assert list(talk.answer(other, [], 4)) == whole(model, other, 4)
    assert talk.prefilled == 3


def test_an_answer_may_be_left(model):
    talk = Conversation(model, 200)
    answer = talk.answer(PROMPT, [], 20)
    heard = [next(answer), next(answer)]
    answer.close()
    longer = PROMPT + heard + [3]
    assert list(talk.answer(longer, [], 3)) == whole(model, longer, 3)


def test_where_it_stops(model):
    talk = Conversation(model, 256)
    expected = whole(model, PROMPT, 8)
    stop = expected[3]
    assert list(talk.answer(PROMPT, [stop])) == expected[: expected.index(stop) + 1]
    small = Conversation(model, 60)
    with pytest.raises(ContextFullError, match="60 tokens, there is room for 60"):
        next(small.answer([1] * 60, []))
    rest = list(small.answer([1] * 58, []))
    assert len(rest) == 2  # the last place is for the last one but none follows it
    with pytest.raises(ValueError, match="outside the vocabulary"):
        next(talk.answer([512], []))
    with pytest.raises(ValueError, match="at least one token"):
        next(talk.answer([], []))


def test_the_seed_and_the_place_decide_a_draw(model):
    sampling = kj.Sampling(temperature=1.0, seed=3)
    found = [list(Conversation(model, 200, sampling).answer(PROMPT, [], 8)) for _ in range(2)]
    assert found[0] == found[1] == kj.generate(model, [PROMPT], 8, sampling, stop_ids=[])[0]
    assert found[0] != whole(model, PROMPT, 8)
    assert np.all(np.asarray(found) < 512)
