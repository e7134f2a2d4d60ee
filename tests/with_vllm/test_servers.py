"""Servers with trained weights, behind pdkv's proxy and vLLM's router: answers are those of an engine on its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from with_vllm import client
from with_vllm.answers import same
from with_vllm.engines import ASK
from with_vllm.fleet import router
from with_vllm.prompts import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

TEXTS = [
    "The capital of France is",
    "Water boils at a temperature of one hundred degrees, and it freezes at",
    "Once upon a time there was a small engine that could read but not write. Every morning it was given a letter, and "
    "every evening it had to say what stood in it. One day another engine came along and said: I can write, but I have "
    "no time to read. So the two of them agreed that from then on",
]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def references(fleet):
    """The answers of an engine without a connector, by text."""
    sent = {text: fleet.reference.send(fleet.tokens(text), max_tokens=NEW_TOKENS) for text in TEXTS}
    return {text: fleet.reference.wait(request_id) for text, request_id in sent.items()}


def fetched(fleet):
    """How many loads have succeeded at the decoding servers."""
    return sum(client.metric(server.url, "vllm:pdkv_xfer_time_seconds_count") for server in fleet.decodes)


def test_answers_are_text(fleet, references):
    answer = client.post(f"{fleet.proxy.url}/v1/completions", client.body(TEXTS[0], max_tokens=4))
    assert "Paris" in answer["choices"][0]["text"]


@pytest.mark.parametrize("text", TEXTS, ids=["short", "middle", "long"])
def test_two_servers_without_a_router(fleet, references, text):
    params = client.complete(fleet.prefills[0].url, text, max_tokens=1, params=dict(ASK)).params
    before = fetched(fleet)
    answer = client.complete(fleet.decodes[0].url, text, max_tokens=NEW_TOKENS, params=params)
    assert same(answer, references[text])
    assert fetched(fleet) == before + 1


@pytest.fixture(scope="module", params=["pdkv proxy", "vllm-router"])
def front(fleet, logs, request):
    """What clients talk to: pdkv's proxy before all servers, or the vLLM project's router before two of them."""
    if request.param == "pdkv proxy":
        yield fleet.proxy.url
        return
    program = router(logs, fleet.prefills[0], fleet.decodes[0])
    yield program.wait().url
    program.stop()


def test_completions_behind_a_router(fleet, front, references):
    before = fetched(fleet)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda text: client.complete(front, text, max_tokens=NEW_TOKENS), TEXTS * 3))
    assert all(map(same, answers, [references[text] for text in TEXTS * 3]))
    assert fetched(fleet) == before + 9


def test_stream_behind_a_router(front, references):
    assert same(client.stream(front, TEXTS[2], max_tokens=NEW_TOKENS), references[TEXTS[2]])


def test_chat_behind_a_router(fleet, front):
    reference = fleet.reference.ask(fleet.chat_tokens(TEXTS[0]), max_tokens=NEW_TOKENS)
    assert same(client.chat(front, TEXTS[0], max_tokens=NEW_TOKENS), reference)


def test_parameters_of_another_prompt(fleet):
    asked, other = prompt(100, 1), prompt(100, 2)

    def swapped():
        return client.complete(fleet.prefills[1].url, other, max_tokens=1, params=dict(ASK)).params

    failing, computing = fleet.decodes
    with pytest.raises(client.RefusedError) as refused:
        client.complete(failing.url, asked, params=swapped())
    assert refused.value.status == 500
    assert same(client.complete(computing.url, asked, params=swapped()), fleet.reference.ask(asked))
    assert all(server.is_well() for server in fleet.servers)


def test_metrics_tell_what_happened(fleet, references):
    for server in fleet.decodes:
        assert client.metric(server.url, "vllm:pdkv_bytes_transferred_sum") > 0
        assert client.metric(server.url, "vllm:pdkv_num_refused_references_total") > 0
