"""Two engines, one prefills and the other decodes: the answers are those of one engine that does both."""

from __future__ import annotations

import pytest

from with_vllm.answers import same
from with_vllm.engines import ASK
from with_vllm.prompts import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("tokens", [1, 5, 31, 32, 33, 64, 200, 1000])
def test_answer_is_that_of_one_engine(pair, tokens):
    asked = prompt(tokens, tokens)
    reference = pair.alone(asked)
    found = pair.ask(asked)
    assert same(found, reference)
    assert found.finish == "length"


def test_decoding_engine_computes_only_the_last_token_of_the_prompt(pair):
    before = pair.decode.call("computed")
    pair.ask(prompt(200, 1), max_tokens=8)
    assert pair.decode.call("computed") - before == 8


def test_answer_depends_on_what_was_handed_over(pair):
    asked = prompt(100, 1)
    reference = pair.alone(asked)
    params = pair.hand_over(asked)
    pair.prefill.call("fill_kv", value=0)
    assert not same(pair.decode.ask(asked, params=params), reference)


def test_token_of_the_prefill_is_the_first_of_the_answer(pair):
    asked = prompt(70, 2)
    first = pair.prefill.ask(asked, params=dict(ASK), max_tokens=1)
    assert first.tokens == pair.decode.ask(asked, params=first.params).tokens[:1]


def test_what_the_decoding_engine_has_is_not_fetched_again(pair):
    known, longer = prompt(100, 3), prompt(100, 3) + prompt(90, 4)
    reference = pair.alone(longer)
    pair.ask(known)
    pair.prefill.call("fill_kv", value=0)
    pair.prefill.wait_until_idle()
    assert pair.prefill.call("reset_prefix_cache")
    assert same(pair.ask(longer), reference)


@pytest.mark.parametrize("tokens", [64, 100])
def test_prompt_that_the_decoding_engine_has_whole_releases_the_other(pair, tokens):
    asked = prompt(tokens, 5)
    reference = pair.alone(asked)
    assert same(pair.ask(asked), reference)
    assert same(pair.ask(asked), reference)
    pair.prefill.wait_until_idle()


def test_prompt_that_the_prefilling_engine_has(pair):
    asked = prompt(130, 6)
    reference = pair.alone(asked)
    pair.prefill.ask(asked)
    assert same(pair.ask(asked), reference)


def test_many_at_once(pair):
    asked = [prompt(20 + 17 * number, number) for number in range(12)]
    references = [pair.alone(one) for one in asked]
    assert all(map(same, pair.ask_all(asked), references))


def test_sequences_of_one_request_share_what_is_handed_over(pair):
    asked = prompt(90, 7)
    sampling = {"n": 3, "temperature": 2.0, "seed": 11, "max_tokens": 16}
    reference = pair.alone(asked, **sampling)
    assert len({tuple(choice.tokens) for choice in reference.choices}) == 3
    found = pair.decode.ask(asked, params=pair.hand_over(asked), **sampling)
    assert same(found, reference)


def test_sequences_of_one_request_at_the_prefill(pair):
    asked = prompt(90, 8)
    reference = pair.alone(asked)
    first = pair.prefill.ask(asked, params=dict(ASK), max_tokens=1, n=3, temperature=1.0, seed=11)
    assert same(pair.decode.ask(asked, params=first.params), reference)


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_prefill": False}, ASK | {"do_remote_decode": False, "do_remote_prefill": True}],
    ids=["none", "empty", "off", "nulls"],
)
def test_without_parameters_the_decoding_engine_prefills(pair, params):
    asked = prompt(100, 9)
    reference = pair.alone(asked)
    before = pair.decode.call("computed")
    assert same(pair.decode.ask(asked, params=params, max_tokens=8), reference)
    assert pair.decode.call("computed") - before == 107


def test_parameters_may_say_more_than_was_answered(pair):
    asked = prompt(100, 10)
    reference = pair.alone(asked)
    params = pair.hand_over(asked) | {"router": {"says": ["hello"]}, "do_remote_decode": None}
    before = pair.decode.call("computed")
    assert same(pair.decode.ask(asked, params=params, max_tokens=8), reference)
    assert pair.decode.call("computed") - before == 8


def test_prompt_with_the_first_token_appended(pair):
    asked = prompt(95, 11)
    longer = asked + pair.alone(asked, max_tokens=1).tokens
    reference = pair.alone(longer)
    assert same(pair.decode.ask(longer, params=pair.hand_over(asked)), reference)


def test_two_requests_with_one_id(pair):
    asked = [prompt(100, 12), prompt(120, 13)]
    references = [pair.alone(one) for one in asked]
    for one, reference in zip(asked, references, strict=True):
        params = pair.prefill.ask(one, params=dict(ASK), max_tokens=1, request_id="twice").params
        assert same(pair.decode.ask(one, params=params, request_id="twice"), reference)
