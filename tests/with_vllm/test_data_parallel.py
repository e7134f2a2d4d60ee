"""Servers with several engines each: whichever of one prefills, whichever of the other decodes."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from with_vllm import client, settings
from with_vllm.answers import same
from with_vllm.engines import ASK
from with_vllm.fleet import proxy
from with_vllm.prompts import prompt
from with_vllm.servers import ForkedServer, Program

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def servers(logs, tiny):
    """One that prefills and one that decodes, of two engines each."""
    arguments = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(settings.KV_BYTES))
    arguments += ("--data-parallel-size", "2")
    both = [
        ForkedServer(name, logs, tiny, transfer=transfer, arguments=arguments)
        for name, transfer in (
            ("double-prefill", settings.transfer("pdkv", "kv_producer")),
            ("double-decode", settings.transfer("pdkv", "kv_consumer")),
        )
    ]
    try:
        yield [server.wait() for server in both]
    finally:
        with ThreadPoolExecutor(2) as pool:
            in_order = list(pool.map(Program.stop, both))
    assert all(in_order)


def rank(number):
    return {"X-data-parallel-rank": str(number)}


def test_every_engine_of_one_fetches_from_every_engine_of_the_other(servers):
    prefill, decode = servers
    engines = set()
    for seed, (source, destination) in enumerate(itertools.product(range(2), range(2))):
        asked = prompt(150, seed)
        reference = client.complete(decode.url, asked, cache_salt="alone")
        params = client.complete(prefill.url, asked, max_tokens=1, params=dict(ASK), headers=rank(source)).params
        engines.add((source, params["remote_engine_id"], params["remote_port"]))
        before = client.metric(decode.url, "vllm:pdkv_xfer_time_seconds_count")
        answer = client.complete(decode.url, asked, params=params, headers=rank(destination))
        assert same(answer, reference)
        assert client.metric(decode.url, "vllm:pdkv_xfer_time_seconds_count") == before + 1
    assert len(engines) == 2  # each has an id and a directory of its own


def test_vllm_chooses_the_engines_behind_the_proxy(servers, logs):
    prefill, decode = servers
    asked = [prompt(60 + 10 * seed, 100 + seed) for seed in range(8)]
    references = [client.complete(decode.url, one, cache_salt="alone") for one in asked]
    before = client.metric(decode.url, "vllm:pdkv_xfer_time_seconds_count")
    front = proxy(logs, [prefill], [decode]).wait()
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda one: client.complete(front.url, one), asked))
    finally:
        assert front.stop()
    assert all(map(same, answers, references))
    assert client.metric(decode.url, "vllm:pdkv_xfer_time_seconds_count") == before + 8
