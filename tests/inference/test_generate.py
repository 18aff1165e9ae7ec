"""Generation: stopping, sampling, independence of rows, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.inference.sampling import Sampler, Sampling

pytestmark = pytest.mark.xdist_group("generate")
MODEL = "tiny-k31"
PROMPTS = [[5, 17, 130, 44, 9], [7], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40]]
SETTINGS = [
    kj.Sampling(temperature=1.0, seed=11),
    kj.Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=12),
    kj.Sampling(temperature=1.3, min_p=0.02, seed=13),
]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny(MODEL)


def alone(model, i, **options):
    """The same prompt among copies of itself: the compiled functions of three rows serve again."""
    return kj.generate(model, [PROMPTS[i]] * 3, 8, stop_ids=[], **options)


def test_golden_continuation_and_logprobs(model, golden):
    data = golden(MODEL)
    prompt, new = data["greedy_prompt_ids"].tolist(), data["greedy_new_ids"].tolist()
    seen = []
    out = kj.generate(
        model, [prompt] * 3, len(new), stop_ids=[], logprobs=True, on_token=lambda row, token: seen.append((row, token))
    )
    assert out == [new] * 3
    assert out.finish_reasons == ["length"] * 3
    assert seen == [(row, token) for token in new for row in range(3)]
    logits = data["greedy_logits"].astype(np.float64)
    logp = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    np.testing.assert_allclose(out.logprobs[0], logp[np.arange(len(new)), new], atol=1e-3)


def test_a_rows_tokens_do_not_depend_on_the_batch(model):
    together = kj.generate(model, PROMPTS, 8, sampling=SETTINGS, stop_ids=[])
    for i in range(3):
        assert alone(model, i, sampling=SETTINGS[i])[i] == together[i]
    assert kj.generate(model, PROMPTS, 8, stop_ids=[]) == [alone(model, i)[0] for i in range(3)]


def test_the_seed_decides(model):
    first, again = (kj.generate(model, PROMPTS, 8, sampling=SETTINGS[0], stop_ids=[]) for _ in range(2))
    other = kj.generate(model, PROMPTS, 8, sampling=kj.Sampling(temperature=1.0, seed=99), stop_ids=[])
    assert first == again
    assert first != other


def test_prompts_are_padded_to_the_mesh(tiny, golden):
    """One prompt on data=2: an empty second row joins and is not returned."""
    prompt, new = (golden(MODEL)[name].tolist() for name in ("greedy_prompt_ids", "greedy_new_ids"))
    assert kj.generate(tiny(MODEL, "data2-tensor2"), [prompt], 8, stop_ids=[]) == [new[:8]]


def test_stop_ids(model):
    whole = kj.generate(model, PROMPTS, 8, stop_ids=[])
    stop = whole[0][3]
    out = kj.generate(model, PROMPTS, 8, stop_ids=[stop])
    assert out[0] == whole[0][: whole[0].index(stop)]
    assert out.finish_reasons[0] == "stop"
    by_default = kj.generate(model.replace(stop_ids=(stop,)), PROMPTS, 8)
    assert by_default == out
    assert model.stop_ids == (510,)


def test_a_row_without_finite_logits_ends_with_an_error_and_harms_no_other(model):
    table = model.params["embed_tokens"]["weight"]
    poisoned = {**model.params, "embed_tokens": {"weight": table.at[30].set(jnp.nan)}}
    out = kj.generate(model.replace(params=poisoned), PROMPTS, 8, stop_ids=[])
    want = kj.generate(model, PROMPTS, 8, stop_ids=[])
    assert out[2] == []
    assert out.finish_reasons[2] == "error"
    assert "the logits after 11 tokens are not finite" in out.errors[2]
    assert out[:2] == want[:2]
    assert out.errors[:2] == [None, None]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1]], {"stop_ids": [512]}, "token id 512 is outside the vocabulary"),
        ([[1], [512]], {}, "token id 512 is outside the vocabulary"),
        ([[1] * 4090], {"max_new_tokens": 7}, "4090 tokens and 7 new ones make 4097, the model's context is 4096"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must be at least 0, found -1"),
        ([[1], [2]], {"sampling": [kj.Sampling()]}, "1 sampling settings for 2 prompts"),
    ],
)
def test_refused_before_anything_runs(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        kj.generate(model, prompts, **options)


def test_nothing_to_do(model):
    assert kj.generate(model, []) == []
    assert kj.generate(model, PROMPTS, max_new_tokens=0) == [[], [], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, found -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0, found nan"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1, found 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, found 0.0"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1, found 1.5"),
        ({"seed": -1}, "seed must be a whole number between 0"),
    ],
)
def test_sampling_values_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        kj.Sampling(**options)


DRAWS = 4000
LOGITS = np.log(np.asarray([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))


def frequencies(setting):
    """How often each of five tokens is drawn, over many positions."""
    sampler = Sampler((setting,) * DRAWS)
    token, _, _ = sampler(np.tile(LOGITS, (DRAWS, 1)), np.arange(DRAWS))
    return np.bincount(token, minlength=5) / DRAWS


@pytest.mark.parametrize(
    ("setting", "want"),
    [
        (Sampling(temperature=1.0), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (Sampling(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.7), [4 / 7, 3 / 7, 0, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.71), [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        (Sampling(temperature=1.0, min_p=0.26), [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        (Sampling(temperature=0.5), np.square([0.4, 0.3, 0.15, 0.1, 0.05]) / 0.285),
        (Sampling(temperature=1.0, top_p=1e-6), [1, 0, 0, 0, 0]),
        (Sampling(temperature=0.0, top_k=3), [1, 0, 0, 0, 0]),
    ],
)
def test_distribution_after_the_filters(setting, want):
    np.testing.assert_allclose(frequencies(setting), want, atol=0.03)
    assert np.all((frequencies(setting) > 0) == (np.asarray(want) > 0))


def test_logprobs_ignore_temperature_and_filters():
    _, logp, finite = Sampler((Sampling(temperature=0.3, top_k=1),))(LOGITS[None], np.asarray([5]))
    np.testing.assert_allclose(logp, np.log(0.4), rtol=1e-5)
    assert finite.tolist() == [True]


def test_ties_go_to_the_lower_id():
    token, _, _ = Sampler((Sampling(),))(jnp.asarray([[0.0, 2.0, 2.0]]), np.asarray([0]))
    assert token.tolist() == [1]
    assert isinstance(token, jax.Array)
