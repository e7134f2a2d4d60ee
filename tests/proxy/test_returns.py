"""KV that no decode leg fetches goes back to a real producer; the instances around it are mocks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import pytest

from connectors.sides import producing
from pdkv.proxy.metrics import Metrics
from pdkv.proxy.returns import Returns
from proxy.world import run, until, world

PROMPT = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 5}
STREAM = PROMPT | {"stream": True}
BODIES = pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["whole", "stream"])
TOLD, FAILED = (f'pdkv_proxy_returns_total{{outcome="{outcome}"}}' for outcome in ("told", "failed"))


@contextlib.contextmanager
def keeping(prefill):
    """A producer that keeps a block for whoever shows what the prefill instances answer, for an hour."""
    with producing() as producer:
        references, _ = producer.export("r", (3, 4), lease_s=3600.0)
        blob = {"engine_id": "p", "references": [[json.loads(text) for text in rank] for rank in references]}
        for engine in prefill:
            engine.params = {"remote_host": "127.0.0.1", "remote_port": producer.address.port, "pdkv": blob}
        yield producer


async def freed(producer):
    await asyncio.to_thread(producer.until_sent, "r")


def counted(w, series, count):
    async def told():
        return (await w.counts()).get(series, 0) == count

    return until(told)


@BODIES
@pytest.mark.parametrize("status", [400, 404, 429, 502])
def test_what_a_decode_instance_turns_down_is_given_back(body, status):
    async def main():
        async with world() as w:
            with keeping(w.prefill) as producer:
                w.decode[0].status = status
                assert (await w.ask(body))[0] == status
                await freed(producer)
                await counted(w, TOLD, 1)

    run(main)


@BODIES
def test_a_decode_instance_that_is_gone_fetches_nothing(body):
    async def main():
        async with world() as w:
            with keeping(w.prefill) as producer:
                await w.decode[0].stop()
                assert (await w.ask(body))[0] == 503
                await freed(producer)

    run(main)


@BODIES
def test_a_client_that_leaves_wants_nothing_any_more(body):
    async def main():
        async with world() as w:
            with keeping(w.prefill) as producer:
                w.decode[0].gate = asyncio.Event()
                asking = asyncio.create_task(w.ask(body))
                await w.decode[0].arrived.wait()
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
                await freed(producer)

    run(main)


@BODIES
def test_each_prefill_of_a_load_that_is_repeated_is_given_back(body):
    async def main():
        async with world() as w:
            with keeping(w.prefill) as producer:
                w.decode[0].status = 500
                assert (await w.ask(body))[0] == 500
                assert len(w.prefill[0].seen) == 2
                await freed(producer)
                await counted(w, TOLD, 2)

    run(main)


@BODIES
def test_what_a_decode_instance_answers_to_was_fetched_or_declined_by_itself(body):
    async def main():
        async with world() as w:
            with keeping(w.prefill) as producer:
                assert (await w.ask(body))[0] == 200
                await w.idle()
                w.proxy._parts.returns.close()  # whatever was to be told is told by then
                producer.look()
                assert producer.sent == []
                assert not any(name.startswith("pdkv_proxy_returns_total{") for name in await w.counts())

    run(main)


def test_what_another_connector_answered_is_left_alone():
    async def main():
        async with world() as w:
            w.decode[0].status = 400
            assert (await w.ask(PROMPT))[0] == 400
            w.proxy._parts.returns.close()
            assert not any(name.startswith("pdkv_proxy_returns_total{") for name in await w.counts())

    run(main)


def test_a_producer_that_is_gone_fails_nobody():
    async def main():
        async with world() as w:
            with keeping(w.prefill):
                pass
            w.decode[0].status = 400
            assert (await w.ask(PROMPT))[0] == 400
            await counted(w, FAILED, 1)
            assert (await w.ask(PROMPT))[0] == 400
            await counted(w, FAILED, 2)

    run(main)


@pytest.mark.parametrize(
    ("host", "settings"),
    [("192.0.2.7", {}), ("127.0.0.1", {"allowed_hosts": ("192.0.2.7",)}), ("127.0.0.1", {"allowed_hosts": ()})],
    ids=["of no prefill instance", "not among those that are allowed", "none is allowed"],
)
def test_an_answer_leads_the_proxy_to_no_other_host(host, settings, monkeypatch, caplog):
    caplog.set_level("INFO", "pdkv.proxy")
    asked = []
    monkeypatch.setattr("pdkv.connectors.core.returner.fetch", lambda *where: asked.append(where))

    async def main():
        async with world(**settings) as w:
            with keeping(w.prefill) as producer:
                w.prefill[0].params["remote_host"] = host
                w.decode[0].status = 400
                assert (await w.ask(PROMPT))[0] == 400
                await counted(w, FAILED, 1)
                producer.look()
                assert producer.sent == []

    run(main)
    assert not asked
    assert f"`{host}` is not among `allowed_hosts`" in caplog.text


def test_a_host_that_is_allowed_is_gone_to():
    async def main():
        async with world(allowed_hosts=("127.0.0.0/8",)) as w:
            with keeping(w.prefill) as producer:
                w.decode[0].status = 400
                assert (await w.ask(PROMPT))[0] == 400
                await freed(producer)

    run(main)


def test_a_client_does_not_wait_for_what_is_given_back():
    async def main():
        async with world() as w:
            free, began = threading.Event(), threading.Event()

            class Slow:
                def give(self, params, timeout_s):
                    began.set()
                    return free.wait(100)

                def close(self):
                    pass

            w.proxy._parts.returns._returner = Slow()
            w.decode[0].status = 400
            try:
                for _ in range(3):
                    assert (await w.ask(PROMPT))[0] == 400
                assert began.wait(100)
            finally:
                free.set()
            await counted(w, TOLD, 3)

    run(main)


def test_the_end_leaves_what_could_not_be_told_in_time_to_its_lease(monkeypatch):
    monkeypatch.setattr("pdkv.proxy.returns._LAST_S", 0.0)
    metrics = Metrics()
    returns = Returns(metrics, 5.0)
    holding, go_on = threading.Event(), threading.Event()
    returns._thread.submit(lambda: (holding.set(), go_on.wait(100)))
    assert holding.wait(100)
    returns.give({"pdkv": {}})
    closing = threading.Thread(target=returns.close)
    closing.start()
    while returns._last is None:
        pass
    go_on.set()
    closing.join()
    assert b'returns_total{outcome="failed"} 1.0' in metrics.render().body
    returns.give({"pdkv": {}})  # is no error


def test_more_than_may_wait_is_left_to_the_lease_at_once(monkeypatch):
    monkeypatch.setattr("pdkv.proxy.returns._MOST_WAITING", 2)
    metrics = Metrics()
    returns = Returns(metrics, 5.0)
    holding, go_on = threading.Event(), threading.Event()
    returns._thread.submit(lambda: (holding.set(), go_on.wait(100)))
    assert holding.wait(100)
    for _ in range(5):
        returns.give({"pdkv": {}})
    assert b'returns_total{outcome="failed"} 3.0' in metrics.render().body
    go_on.set()
    returns.close()
