"""Pairs of engines of other makings: too little memory, windows, half precision, several workers."""

from __future__ import annotations

import pytest

from with_vllm import models
from with_vllm.answers import same
from with_vllm.engines import Pair
from with_vllm.prompts import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def tight(logs, tiny, connector):
    """No prefix cache, prompts computed 64 tokens at a time, and hardly more memory than one request may need."""
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 64, "max_model_len": 512}
    pair = Pair("tight", logs, tiny, connector, num_gpu_blocks_override=24, **settings)
    yield pair
    assert pair.close()


@pytest.fixture(scope="module")
def windowed(logs, connector):
    """A model whose layers see different spans of the prompt: several KV groups, of which some drop blocks."""
    pair = Pair("windowed", logs, models.windowed(), connector, max_num_batched_tokens=96)
    yield pair
    assert pair.close()


@pytest.fixture(scope="module")
def half(logs, tiny, connector):
    pair = Pair("half", logs, tiny, connector, dtype="bfloat16")
    yield pair
    assert pair.close()


@pytest.fixture(scope="module")
def sharded(logs, tiny, connector):
    """Two workers on both sides, each with half of the heads."""
    pair = Pair("sharded", logs, tiny, connector, tensor_parallel_size=2, distributed_executor_backend="mp")
    yield pair
    assert pair.close()


@pytest.mark.parametrize("tokens", [30, 64, 65, 450])
def test_prompt_computed_in_chunks_without_prefix_cache(tight, tokens):
    asked = prompt(tokens, tokens)
    assert same(tight.ask(asked), tight.decode.ask(asked))


def test_requests_that_preempt_one_another(tight):
    before = tight.free_blocks()
    asked = [prompt(100 + number, number) for number in range(8)]
    references = [tight.decode.ask(one, max_tokens=60) for one in asked]
    preempted = tight.decode.call("preemptions")
    found = tight.ask_all(asked, max_tokens=60)
    assert all(map(same, found, references))
    assert tight.decode.call("preemptions") > preempted
    for engine in (tight.prefill, tight.decode):
        engine.wait_until_idle()
    assert tight.free_blocks() == before


@pytest.mark.parametrize("tokens", [30, 64, 100, 200, 700])
def test_layers_with_windows(windowed, tokens):
    asked = prompt(tokens, tokens)
    reference = windowed.alone(asked, max_tokens=16)
    assert len(set(reference.tokens)) > 4
    computed = windowed.decode.call("computed")
    assert same(windowed.ask(asked, max_tokens=16), reference)
    assert windowed.decode.call("computed") - computed == 16


def test_layers_with_windows_and_a_known_beginning(windowed):
    known, longer = prompt(300, 1), prompt(300, 1) + prompt(100, 2)
    reference = windowed.alone(longer)
    windowed.ask(known)
    assert same(windowed.ask(longer), reference)


def test_answer_of_layers_with_windows_depends_on_what_was_handed_over(windowed):
    asked = prompt(200, 3)
    reference = windowed.alone(asked)
    params = windowed.hand_over(asked)
    windowed.prefill.call("fill_kv", value=0)
    assert not same(windowed.decode.ask(asked, params=params), reference)


def test_half_precision(half):
    for tokens in (40, 64, 300):
        asked = prompt(tokens, tokens)
        reference = half.alone(asked)
        # bfloat16 has three digits
        assert same(half.ask(asked), reference, tolerance=0.1)


def test_several_workers(sharded):
    for tokens in (5, 64, 300):
        asked = prompt(tokens, tokens)
        reference = sharded.alone(asked)
        computed = sharded.decode.call("computed")
        assert same(sharded.ask(asked, max_tokens=8), reference)
        assert sharded.decode.call("computed") - computed == 8
    asked = [prompt(90, seed) for seed in range(4)]
    references = [sharded.alone(one) for one in asked]
    assert all(map(same, sharded.ask_all(asked), references))
