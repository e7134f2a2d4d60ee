"""Pairs of engines with what vLLM can do besides: tokens that are guessed, adapters, layers spread over workers."""

from __future__ import annotations

import pytest

from with_vllm import models
from with_vllm.answers import same
from with_vllm.engines import ASK, Pair
from with_vllm.prompts import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def drafting(model):
    """The model guesses for itself: every guess is right, and the guesses have KV of their own."""
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}


def check(pair, lengths=(5, 32, 33, 200), **arguments):
    """Answers are those of the decoding engine alone, and it computes no prompt. Gives the free blocks back."""
    pair.forget()
    before = pair.free_blocks()
    for tokens in lengths:
        asked = prompt(tokens, tokens)
        reference = pair.alone(asked, max_tokens=24)
        preceding = pair.decode.call("prefilled")
        assert same(pair.ask(asked, max_tokens=24), reference)
        assert pair.decode.call("prefilled") - preceding == 1
    asked = [prompt(40 + 9 * seed, seed) for seed in range(6)]
    references = [pair.alone(one, max_tokens=16) for one in asked]
    assert all(map(same, pair.ask_all(asked, max_tokens=16), references))
    pair.forget()
    assert pair.free_blocks() == before


@pytest.mark.parametrize("both", [True, False], ids=["both", "decode only"])
def test_tokens_guessed_from_the_prompt(logs, tiny, connector, both):
    guessing = {"speculative_config": NGRAM}
    pair = Pair(f"ngram-{both}", logs, tiny, connector, prefill=dict(guessing) if both else {}, decode=dict(guessing))
    try:
        check(pair)
        assert pair.decode.call("guessed")[0] > 0
    finally:
        assert pair.close()


def test_tokens_guessed_by_a_model_with_kv_of_its_own(logs, tiny, connector):
    pair = Pair("drafting", logs, tiny, connector, speculative_config=drafting(tiny))
    try:
        check(pair)
        guessed, right = pair.decode.call("guessed")
        assert right > guessed / 2 > 0
    finally:
        assert pair.close()


def test_a_model_that_guesses_on_one_side_only_is_refused(logs, tiny):
    """Its KV was not computed at the other."""
    pair = Pair("drafting-one", logs, tiny, "pdkv", decode={"speculative_config": drafting(tiny)})
    try:
        found = pair.ask(prompt(100, 1))
        assert (found.finish, found.tokens) == ("error", [])
        assert "layers of group 0 is `8` here and `4` there" in pair.decode.log.read_text()
    finally:
        assert pair.close()


@pytest.fixture(scope="module")
def adapted(logs, tiny, connector):
    pair = Pair("adapted", logs, tiny, connector, enable_lora=True, max_lora_rank=8, max_loras=2)
    yield pair
    assert pair.close()


ADAPTERS = pytest.mark.parametrize("number", [None, 1, 2])


def adapter(number):
    return None if number is None else str(models.adapter(number))


@ADAPTERS
def test_prompt_of_an_adapter(adapted, number):
    asked = prompt(100, 1)
    reference = adapted.alone(asked, adapter=adapter(number))
    others = [adapted.alone(asked, adapter=adapter(other)) for other in {None, 1, 2} - {number}]
    assert not any(same(reference, other) for other in others)
    params = adapted.hand_over(asked, adapter=adapter(number))
    computed = adapted.decode.call("computed")
    assert same(adapted.decode.ask(asked, params=params, adapter=adapter(number), max_tokens=8), reference)
    assert adapted.decode.call("computed") - computed == 8


@ADAPTERS
@pytest.mark.parametrize("other", [None, 1, 2])
def test_kv_of_one_adapter_is_not_anothers(adapted, connector, number, other):
    if number == other:
        return
    if connector != "pdkv":
        pytest.skip("only pdkv compares")
    asked = prompt(100, 2)
    reference = adapted.alone(asked, adapter=adapter(number))
    params = adapted.hand_over(asked, adapter=adapter(number))
    found = adapted.decode.ask(asked, params=params, adapter=adapter(other))
    assert (found.finish, found.tokens) == ("error", [])
    # It was refused before it could be used, so it is there for whom it is meant.
    assert same(adapted.decode.ask(asked, params=params, adapter=adapter(number)), reference)


@pytest.fixture(scope="module")
def staged(logs, tiny, connector):
    """Two workers on both sides, each with half of the layers."""
    # vLLM's CPU worker makes the buffers between the stages when it warms up, which it does not without a compiler.
    compiled = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
    stages = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    pair = Pair("staged", logs, tiny, connector, **stages, **compiled)
    yield pair
    assert pair.close()


def test_layers_spread_over_workers(staged):
    check(staged)


def test_answer_of_spread_layers_depends_on_what_each_worker_handed_over(staged):
    asked = prompt(100, 1)
    reference = staged.alone(asked)
    for stage in range(2):
        params = staged.hand_over(asked)
        staged.prefill.call("fill_kv_of", rank=stage, value=0)
        assert not same(staged.decode.ask(asked, params=params), reference)
        staged.forget()


def test_token_of_a_prefill_by_stages_is_the_first(staged):
    asked = prompt(70, 2)
    first = staged.prefill.ask(asked, params=dict(ASK), max_tokens=1)
    assert first.tokens == staged.decode.ask(asked, params=first.params).tokens[:1]


@pytest.fixture(scope="module")
def pictured(logs, connector):
    """A model that sees a picture before what is said of it."""
    # vLLM's own choice of a digest for pictures needs another package.
    pair = Pair("pictured", logs, models.pictured(), connector, mm_hasher_algorithm="sha256")
    yield pair
    assert pair.close()


def test_prompt_with_a_picture(pictured):
    pair, asked = pictured, prompt(70, 1)
    references = [pair.alone(asked, picture=seed) for seed in range(2)]
    assert not same(*references)
    for seed, reference in enumerate(references):
        params = pair.hand_over(asked, picture=seed)
        before = pair.decode.call("prefilled")
        assert same(pair.decode.ask(asked, params=params, picture=seed), reference)
        assert pair.decode.call("prefilled") - before == 1


def test_kv_of_one_picture_is_not_anothers(pictured, connector):
    if connector != "pdkv":
        pytest.skip("only pdkv compares")
    pair, asked = pictured, prompt(70, 2)
    reference = pair.alone(asked, picture=3)
    params = pair.hand_over(asked, picture=3)
    found = pair.decode.ask(asked, params=params, picture=4)
    assert (found.finish, found.tokens) == ("error", [])
    assert same(pair.decode.ask(asked, params=params, picture=3), reference)
