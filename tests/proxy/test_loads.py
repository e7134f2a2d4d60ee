"""A decode instance that can't load the KV it was promised: what is repeated, and what the client gets."""

from __future__ import annotations

import asyncio
import json

import pytest

from pdkv.proxy import sse
from proxy.engine import expected
from proxy.world import events, run, spoken, world

PROMPT = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 5}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 5}

BODIES = {
    "whole": PROMPT,
    "stream": PROMPT | {"stream": True},
    "chat": CHAT,
    "chat stream": CHAT | {"stream": True},
    "chat stream of three": CHAT | {"stream": True, "n": 3},
}
each_body = pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)


def text(answer):
    if not isinstance(answer, dict):
        return spoken(events(answer))
    [choice, *_] = answer["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def references(engine):
    return [sent["kv_transfer_params"]["pdkv"]["reference"] for sent in engine.bodies]


@each_body
def test_a_prefill_instance_that_dies_between_the_legs_costs_the_client_nothing(body):
    async def main():
        async with world(prefill=2) as w:
            decode = w.decode[0]
            decode.gate = asyncio.Event()
            asking = asyncio.create_task(w.ask(body, chat="messages" in body))
            await decode.arrived.wait()
            [dying] = [engine for engine in w.prefill if engine.seen]
            [other] = [engine for engine in w.prefill if not engine.seen]
            await dying.stop()
            decode.references.clear()  # its KV is gone with it
            decode.gate.set()
            status, answer, _ = await asking
            assert (status, text(answer)) == (200, expected(body))
            assert "error" not in (answer if isinstance(answer, dict) else answer.split())
            assert len(other.seen) == 1
            assert len(set(references(decode))) == 2
            counts = await w.counts()
            assert counts['pdkv_proxy_retries_total{role="decode"}'] == 1
            assert counts[f'pdkv_proxy_requests_total{{endpoint="{_endpoint(body)}",outcome="ok"}}'] == 1
            await w.idle()

    run(main)


@each_body
def test_a_second_load_that_fails_reaches_the_client(body):
    async def main():
        async with world(prefill=2, decode=2, retries=5) as w:
            for engine in w.decode:
                engine.fail_loads = 9
            status, answer, _ = await w.ask(body, chat="messages" in body)
            stream = body.get("stream")
            assert status == (200 if stream else 500)
            *_, told, end = [*events(answer)] if stream else [answer, None]
            assert (told["error"]["code"], end) == (500, "[DONE]" if stream else None)
            assert sum(len(engine.seen) for engine in w.decode) == 2
            assert sum(len(engine.seen) for engine in w.prefill) == 2

    run(main)


@pytest.mark.parametrize(
    ("settings", "extra", "seen"), [({"retries": 0}, {}, 1), ({}, {"use_beam_search": True}, 1)], ids=["told", "alone"]
)
def test_a_500_is_not_repeated_where_that_is_not_wanted_or_nothing_was_loaded(settings, extra, seen):
    async def main():
        async with world(decode=2, **settings) as w:
            for engine in w.decode:
                engine.status = 500
            assert (await w.ask(PROMPT | extra))[0] == 500
            assert sum(len(engine.seen) for engine in w.decode) == seen

    run(main)


def test_an_error_after_the_first_word_is_the_client_s():
    async def main():
        body = b'data: {"choices": [{"text": "word"}]}\n\ndata: {"error": {"code": 500}}\n\ndata: [DONE]\n\n'

        async with world(decode=1) as w:
            w.decode[0].events = body
            status, answer, _ = await w.ask(BODIES["stream"])
            assert (status, answer.encode()) == (200, body)
            assert len(w.decode[0].seen) == 1

    run(main)


def chunk(**choice):
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


ROLE = chunk(delta={"role": "assistant", "content": ""}, finish_reason=None)
ERROR = b'data: {"error": {"message": "m", "code": 500}}\n\n'


@pytest.mark.parametrize(
    ("whole", "begins"),
    [
        (b"", sse.Begins.NOT_YET),
        (b": comment\n\n", sse.Begins.NOT_YET),
        (ROLE, sse.Begins.NOT_YET),
        (ROLE * 3 + ERROR, sse.Begins.BADLY),
        (ERROR, sse.Begins.BADLY),
        (ERROR.replace(b"500", b"400"), sse.Begins.WELL),
        (b'data: {"error": null, "choices": [{"text": ""}]}\n\n', sse.Begins.WELL),
        (ROLE + chunk(delta={"content": "a"}) + ERROR, sse.Begins.WELL),
        (ROLE + chunk(delta={"tool_calls": [1]}), sse.Begins.WELL),
        (chunk(delta={"content": ""}, finish_reason="stop"), sse.Begins.WELL),
        (chunk(text="a") + ERROR, sse.Begins.WELL),
        (b"data: [DONE]\n\n", sse.Begins.WELL),
        (b"data: []\n\n", sse.Begins.WELL),
        (b'data: {"choices": []}\n\n', sse.Begins.WELL),
        (b'data: {"choices": [5]}\n\n', sse.Begins.WELL),
        (b"data: " + b"[" * 60_000 + b"\n\n", sse.Begins.WELL),
        (ROLE * 2000, sse.Begins.WELL),
    ],
)
def test_how_a_stream_begins(whole, begins):
    assert sse.begins(whole) is begins


def _endpoint(body):
    return "chat" if "messages" in body else "completions"
