"""Requests that end before their answer, in every state and on both sides: no other notices, no block stays behind."""

from __future__ import annotations

import random

import pytest

from with_vllm.answers import same
from with_vllm.engines import ASK
from with_vllm.prompts import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

# The fixture `pair` checks after each test that both engines have all their blocks back.
ASKED = prompt(100, 1)


def step_until(engine, request_id, state):
    """Steps an engine that is held by hand until the scheduler says this of the request."""
    while engine.call("states", request_id=request_id) != [state]:
        assert engine.call("step"), f"never `{state}`"


def check(pair):
    """Both engines do what they did before."""
    asked = prompt(90, 2)
    assert same(pair.ask(asked), pair.alone(asked))


def test_before_the_decoding_engine_has_looked_at_it(pair):
    params = pair.hand_over(ASKED)
    with pair.decode.by_hand():
        request_id = pair.decode.send(ASKED, params=params)
        assert pair.decode.call("states", request_id=request_id) == ["WAITING"]
        pair.decode.call("abort", request_id=request_id)
    check(pair)


def test_while_it_waits_for_the_prefilling_engine(pair):
    with pair.prefill.by_hand(), pair.decode.by_hand():
        prefilled = pair.prefill.send(ASKED, params=dict(ASK), max_tokens=1)
        while not pair.prefill.has(prefilled):
            pair.prefill.call("step")
        # That engine knows of the export only at its next step; until then whoever comes for it waits.
        request_id = pair.decode.send(ASKED, params=pair.prefill.wait(prefilled).params)
        step_until(pair.decode, request_id, "WAITING_FOR_REMOTE_KVS")
        for _ in range(3):
            pair.decode.call("step")
        assert pair.decode.call("states", request_id=request_id) == ["WAITING_FOR_REMOTE_KVS"]
        pair.decode.call("abort", request_id=request_id)
    check(pair)


def test_when_it_was_fetched_and_not_yet_run(pair):
    params = pair.hand_over(ASKED)
    with pair.decode.by_hand():
        request_id = pair.decode.send(ASKED, params=params)
        step_until(pair.decode, request_id, "WAITING_FOR_REMOTE_KVS")
        pair.prefill.wait_until_idle()  # by then everything has been read
        pair.decode.call("abort", request_id=request_id)
    check(pair)


def test_while_it_is_decoded(pair):
    params = pair.hand_over(ASKED)
    with pair.decode.by_hand():
        request_id = pair.decode.send(ASKED, params=params, max_tokens=50)
        step_until(pair.decode, request_id, "RUNNING")
        pair.decode.call("step")
        pair.decode.call("abort", request_id=request_id)
    check(pair)


def test_before_the_prefilling_engine_has_looked_at_it(pair):
    with pair.prefill.by_hand():
        request_id = pair.prefill.send(ASKED, params=dict(ASK), max_tokens=1)
        pair.prefill.call("abort", request_id=request_id)
    check(pair)


def test_while_the_prefilling_engine_makes_more_than_one_token(pair):
    with pair.prefill.by_hand():
        request_id = pair.prefill.send(ASKED, params=dict(ASK), max_tokens=50)
        step_until(pair.prefill, request_id, "RUNNING")
        pair.prefill.call("step")
        pair.prefill.call("abort", request_id=request_id)
    check(pair)


def test_one_of_two_that_wait_for_the_same_engine(pair):
    other = prompt(80, 3)
    reference = pair.alone(other)
    with pair.prefill.by_hand(), pair.decode.by_hand():
        prefilled = [pair.prefill.send(one, params=dict(ASK), max_tokens=1) for one in (ASKED, other)]
        while not all(map(pair.prefill.has, prefilled)):
            pair.prefill.call("step")
        params = [pair.prefill.wait(one).params for one in prefilled]
        sent = [pair.decode.send(one, params=its) for one, its in zip((ASKED, other), params, strict=True)]
        for request_id in sent:
            step_until(pair.decode, request_id, "WAITING_FOR_REMOTE_KVS")
        pair.decode.call("abort", request_id=sent[0])
    assert same(pair.decode.wait(sent[1]), reference)


def test_sequences_of_one_request(pair):
    params = pair.hand_over(ASKED)
    with pair.decode.by_hand():
        request_id = pair.decode.send(ASKED, params=params, n=3, temperature=1.0)
        pair.decode.call("step")
        pair.decode.call("abort", request_id=request_id)
    check(pair)


@pytest.mark.parametrize("seed", range(3))
def test_many_with_some_that_leave_at_random(pair, seed):
    dice = random.Random(seed)
    asked = [prompt(dice.randrange(1, 300), 1000 * seed + number) for number in range(16)]
    references = [pair.alone(one) for one in asked]
    left, sent = set(), {}
    with pair.prefill.by_hand():
        prefilled = [pair.prefill.send(one, params=dict(ASK), max_tokens=1) for one in asked]
        for number, request_id in enumerate(prefilled):
            if number == 8:
                pair.prefill.call("step")
            if dice.random() < 0.3 and not pair.prefill.has(request_id):
                pair.prefill.call("abort", request_id=request_id)
                left.add(number)
    for number in sorted(set(range(16)) - left, key=lambda _: dice.random()):
        sent[number] = pair.decode.send(asked[number], params=pair.prefill.wait(prefilled[number]).params)
        gone = dice.choice(list(sent))
        if dice.random() < 0.4 and gone not in left and not pair.decode.has(sent[gone]):
            pair.decode.call("abort", request_id=sent[gone])
            left.add(gone)
    assert left
    for number in set(sent) - left:
        assert same(pair.decode.wait(sent[number]), references[number]), (seed, number)
