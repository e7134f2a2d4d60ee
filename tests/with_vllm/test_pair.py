"""Two engines, one prefills and the other decodes: the answers are those of one engine that does both."""

from __future__ import annotations

import random

import pytest

from with_vllm.answers import same
from with_vllm.engines import Pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def prompt(tokens, seed):
    """So many tokens of the tiny model's vocabulary, at random."""
    return random.Random(seed).choices(range(2, 400), k=tokens)


@pytest.fixture(scope="module")
def pair(logs, tiny, connector):
    pair = Pair("pair", logs, tiny, connector)
    yield pair
    assert pair.close()


@pytest.mark.parametrize("tokens", [5, 32, 33, 200])
def test_answer_is_that_of_one_engine(pair, tokens):
    asked = prompt(tokens, tokens)
    reference = pair.alone(asked)
    assert same(pair.ask(asked), reference)


def test_answer_depends_on_what_was_handed_over(pair):
    asked = prompt(100, 1)
    reference = pair.alone(asked)
    params = pair.hand_over(asked)
    pair.prefill.call("fill_kv", value=0)
    assert not same(pair.decode.ask(asked, params=params), reference)


def test_free_blocks_return_to_their_number(pair):
    pair.forget()
    before = pair.free_blocks()
    for seed in range(3):
        pair.ask(prompt(90, seed))
    pair.forget()
    assert pair.free_blocks() == before
