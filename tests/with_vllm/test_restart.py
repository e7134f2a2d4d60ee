"""The prefilling engine dies, comes back at the same address as another, or as one that doesn't fit."""

from __future__ import annotations

import pytest

from with_vllm import models
from with_vllm.answers import same
from with_vllm.engines import ASK, Pair
from with_vllm.ports import free_port
from with_vllm.prompts import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

ASKED = prompt(150, 1)


@pytest.fixture(scope="module")
def address():
    """What a restarted engine keeps: the port of its directory and that of its rank."""
    return {"port": free_port(), "engine_port": free_port()}


@pytest.fixture(scope="module")
def pair(logs, tiny, address):
    pair = Pair(
        "restart",
        logs,
        tiny,
        "pdkv",
        policy="recompute",
        prefill={"extra": address},
        decode={"enable_prefix_caching": False},
    )
    pair.reference = pair.decode.ask(ASKED)
    pair.blocks = pair.decode.call("free_blocks")
    yield pair
    assert pair.close()


def check(pair, params, *, computed):
    """The right answer, after so many tokens were computed for it; 8 if the prompt was fetched."""
    before = pair.decode.call("computed")
    assert same(pair.decode.ask(ASKED, params=params, max_tokens=8), pair.reference)
    assert pair.decode.call("computed") - before == computed
    pair.decode.wait_until_idle()
    assert pair.decode.call("free_blocks") == pair.blocks


def test_engine_dies_while_a_request_waits_for_it_and_comes_back(pair, address):
    check(pair, pair.hand_over(ASKED), computed=8)
    with pair.prefill.by_hand():
        prefilled = pair.prefill.send(ASKED, params=dict(ASK), max_tokens=1)
        while not pair.prefill.has(prefilled):
            pair.prefill.call("step")
        params = pair.prefill.wait(prefilled).params
        request_id = pair.decode.send(ASKED, params=params)
        while pair.decode.call("states", request_id=request_id) != ["WAITING_FOR_REMOTE_KVS"]:
            assert not pair.decode.has(request_id)
        pair.prefill.kill()
    assert same(pair.decode.wait(request_id), pair.reference)
    check(pair, params, computed=157)

    # The next one has other blocks, and knows nothing of references of the one before.
    pair.replace_prefill(extra=address, num_gpu_blocks_override=77)
    pair.prefill.wait_until_started()
    check(pair, params, computed=157)
    check(pair, pair.hand_over(ASKED), computed=8)


@pytest.mark.parametrize(
    "other",
    [{"dtype": "bfloat16"}, {"block_size": 64}, {"model": models.windowed}],
    ids=["dtype", "block size", "model"],
)
def test_engine_that_does_not_fit(pair, address, other):
    other = {key: value() if callable(value) else value for key, value in other.items()}
    pair.replace_prefill(extra=address, **other)
    pair.prefill.wait_until_started()
    check(pair, pair.hand_over(ASKED), computed=157)
