"""Clients that leave or take nothing, and a proxy that is told to end: the leg that runs is closed, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import pytest

import chance
from patience import follows_the_machine
from proxy.engine import expected
from proxy.world import events, run, spoken, until, world

PROMPT = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 5}
STREAM = PROMPT | {"stream": True}
BODIES = pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["whole", "stream"])


async def leave(asking):
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


async def cancelled(w, count=1):
    """Waits until the proxy has counted it; every other outcome stays at nothing."""
    series = 'pdkv_proxy_requests_total{endpoint="completions",outcome="cancelled"}'

    async def told():
        return (await w.counts()).get(series) == count

    await until(told)
    await w.idle()


@BODIES
def test_a_client_that_leaves_during_prefill_ends_the_prefill_leg(body):
    async def main():
        async with world() as w:
            [prefill], [decode] = w.prefill, w.decode
            prefill.gate = asyncio.Event()
            asking = asyncio.create_task(w.ask(body, **{"X-Request-Id": "leaving"}))
            await prefill.arrived.wait()
            series = f'pdkv_proxy_in_flight_requests{{instance="{prefill.url}",role="prefill"}}'
            assert (await w.counts())[series] == 1
            await leave(asking)
            await prefill.gone.wait()
            await cancelled(w)
            assert prefill.aborted == ["leaving"]
            assert decode.seen == []

    run(main)


@BODIES
def test_a_client_that_leaves_before_the_answer_ends_the_decode_leg(body):
    async def main():
        async with world(decode=2) as w:
            for engine in w.decode:
                engine.gate = asyncio.Event()
            asking = asyncio.create_task(w.ask(body, **{"X-Request-Id": "leaving"}))
            await w.decode[0].arrived.wait()
            await leave(asking)
            await w.decode[0].gone.wait()
            await cancelled(w)
            assert w.decode[0].aborted == ["leaving"]
            assert w.decode[1].seen == []  # leaving is no failure: nobody else is asked

    run(main)


def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_the_decode_leg():
    async def main():
        async with world() as w:
            [decode] = w.decode
            decode.gate, decode.words_first = asyncio.Event(), 2
            async with w.client.post(w.url + "/v1/completions", json=STREAM) as response:
                await response.content.readuntil(b"\n\n")
                await decode.arrived.wait()
            await decode.gone.wait()
            await cancelled(w)

    run(main)


@follows_the_machine
def test_a_client_that_takes_nothing_is_left_at_the_idle_timeout(patience_s):
    async def main():
        async with world(idle_timeout_s=patience_s) as w:
            [decode] = w.decode
            decode.padding = 1 << 20
            reader, writer = await asyncio.open_connection(*w.url.removeprefix("http://").split(":"), limit=1024)
            body = json.dumps(STREAM | {"max_tokens": 64}).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await decode.gone.wait()
            await cancelled(w)
            taken = await reader.read()  # ends: the connection isn't kept for what it might take yet
            assert taken.startswith(b"HTTP/1.1 200 ")
            assert taken.count(b"HTTP/1.1") == 1
            assert not taken.endswith(b"0\r\n\r\n")
            writer.close()

    run(main)


def test_a_client_that_leaves_before_its_body_is_there_asks_nobody():
    async def main():
        async with world() as w:
            _, writer = await asyncio.open_connection(*w.url.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: 100\r\n\r\n{")
            await writer.drain()
            await until(lambda: bool(w.proxy._running))
            writer.close()
            await cancelled(w)
            assert w.prefill[0].seen == w.decode[0].seen == []

    run(main)


def test_a_body_that_does_not_come_is_waited_for_only_so_long():
    async def main():
        async with world(idle_timeout_s=1.0) as w:
            reader, writer = await asyncio.open_connection(*w.url.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: 100\r\n\r\n{")
            assert b" 408 " in await reader.readline()
            writer.close()

    run(main)


def test_a_hundred_at_once_end_in_every_way_and_leave_nothing():
    seed = chance.seed()
    leaves = random.Random(seed).choices([True, False], k=100)

    async def one(w, number, now):
        body = {"prompt": f"request {number}", "max_tokens": 6, "stream": number % 2 == 0}
        asking = asyncio.create_task(w.ask(body))
        if leaves[number]:
            await now.wait()
            return await leave(asking)
        status, answer, _ = await asking
        said = spoken(events(answer)) if body["stream"] else answer["choices"][0]["text"]
        assert (status, said) == (200, expected(body))
        return None

    async def main():
        async with world(prefill=3, decode=3) as w:
            gate, now = asyncio.Event(), asyncio.Event()
            for engine in w.decode:
                engine.gate = gate
            asking = asyncio.gather(*(one(w, number, now) for number in range(100)))
            await until(lambda: sum(engine.running for engine in w.decode) == 100)
            counts = await w.counts()
            shown = [counts[f'pdkv_proxy_in_flight_requests{{instance="{e.url}",role="decode"}}'] for e in w.decode]
            assert shown == [engine.running for engine in w.decode]
            assert sorted(shown) == [33, 33, 34]
            now.set()
            await until(lambda: sum(len(engine.aborted) for engine in w.decode) == sum(leaves))
            gate.set()
            await asking
            await cancelled(w, sum(leaves))
            assert not any(engine.running for engine in w.prefill + w.decode)
            assert len(w.prefill[0].references) == sum(leaves)  # the others were used, each once
            assert not w.proxy._running

    try:
        run(main)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


@BODIES
def test_a_proxy_that_ends_lets_requests_end_and_takes_no_new_ones(body):
    async def main():
        async with world() as w:
            [decode] = w.decode
            decode.gate, decode.words_first = asyncio.Event(), 2
            asking = asyncio.create_task(w.ask(body))
            await decode.arrived.wait()
            draining = asyncio.create_task(w.proxy.drain(asyncio.Event()))
            await asyncio.sleep(0)
            assert (await w.get("/health"))[0] == 503
            assert (await w.ask(body))[0] == 503
            assert not draining.done()
            decode.gate.set()
            await draining
            status, answer, _ = await asking
            said = spoken(events(answer)) if body is STREAM else answer["choices"][0]["text"]
            assert (status, said) == (200, expected(body))

    run(main)


@BODIES
@pytest.mark.parametrize("why", ["time is over", "second signal"])
def test_what_outlives_the_end_of_the_proxy_ends_with_an_error(body, why):
    async def main():
        async with world(drain_timeout_s=0.1 if why == "time is over" else 1000.0) as w:
            [decode] = w.decode
            decode.gate, decode.words_first = asyncio.Event(), 2
            asking = asyncio.create_task(w.ask(body))
            await decode.arrived.wait()
            cut = asyncio.Event()
            if why == "second signal":
                cut.set()
            await w.proxy.drain(cut)
            status, answer, _ = await asking
            if body is STREAM:
                assert status == 200
                assert events(answer)[-1]["error"]["code"] == 503
            else:
                assert (status, answer["error"]["code"]) == (503, 503)
            await decode.gone.wait()
            await w.idle()

    run(main)


def test_a_proxy_without_requests_ends_at_once():
    async def main():
        async with world(drain_timeout_s=1000.0) as w:
            await w.proxy.drain(asyncio.Event())

    run(main)
