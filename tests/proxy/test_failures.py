"""Instances that refuse, err, break off or fall silent: what is repeated, where, and what the client is told."""

from __future__ import annotations

import asyncio
import gzip
import json

import aiohttp
import pytest

from patience import follows_the_machine
from proxy.engine import expected
from proxy.world import events, run, spoken, until, world

PROMPT = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 5}
STREAM = PROMPT | {"stream": True}


def text(answer):
    return answer["choices"][0]["text"] if isinstance(answer, dict) else spoken(events(answer))


async def refuse(engine):
    await engine.stop()


async def drop(engine):
    engine.drop = True


def say(status):
    async def spoil(engine):
        engine.status = status

    return spoil


AWAY = {"refuses": refuse, "drops": drop, "502": say(502), "503": say(503), "504": say(504)}


@pytest.mark.parametrize("spoil", AWAY.values(), ids=AWAY)
@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["whole", "stream"])
def test_prefill_goes_to_another_instance(spoil, body):
    async def main():
        async with world(prefill=2) as w:
            bad, good = w.prefill
            await spoil(bad)
            status, answer, _ = await w.ask(body)
            assert (status, text(answer)) == (200, expected(PROMPT))
            assert len(good.seen) == 1
            counts = await w.counts()
            assert counts['pdkv_proxy_retries_total{role="prefill"}'] == 1
            assert counts['pdkv_proxy_requests_total{endpoint="completions",outcome="ok"}'] == 1
            assert len(w.decode[0].seen) == 1
            await w.idle()

    run(main)


@pytest.mark.parametrize("spoil", AWAY.values(), ids=AWAY)
@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["whole", "stream"])
def test_decode_goes_to_another_instance_with_a_reference_that_nobody_has_seen(spoil, body):
    async def main():
        async with world(decode=2) as w:
            bad, good = w.decode
            await spoil(bad)
            status, answer, _ = await w.ask(body)
            assert (status, text(answer)) == (200, expected(PROMPT))
            seen = len(bad.seen)
            assert len(w.prefill[0].seen) == 1 + seen  # a fresh prefill only where the reference was shown to somebody
            shown = [sent["kv_transfer_params"]["pdkv"]["reference"] for sent in bad.bodies + good.bodies]
            assert len(set(shown)) == len(shown) == 1 + seen
            assert (await w.counts())['pdkv_proxy_retries_total{role="decode"}'] == 1
            await w.idle()

    run(main)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500])
@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["whole", "stream"])
def test_other_errors_reach_the_client_as_they_are_and_are_not_repeated(role, status, body):
    async def main():
        async with world(prefill=2, decode=2) as w:
            for engine in getattr(w, role):
                engine.status = status
            got, answer, headers = await w.ask(body)
            assert got == status
            assert answer == {"error": {"message": f"told to say {status}", "type": "E", "param": None, "code": status}}
            assert "X-Request-Id" in headers
            legs = 2 if (role, status) == ("decode", 500) else 1  # which may be a load that failed: below
            assert sum(len(engine.seen) for engine in w.prefill) == legs
            assert sum(len(engine.seen) for engine in w.decode) == legs * (role == "decode")
            outcome = "refused" if status < 500 else "failed"
            assert (await w.counts())[f'pdkv_proxy_requests_total{{endpoint="completions",outcome="{outcome}"}}'] == 1

    run(main)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_last_answer_reaches_the_client_when_all_are_away(role):
    async def main():
        async with world(prefill=3, decode=3, retries=1) as w:
            for engine in getattr(w, role):
                engine.status = 503
            status, answer, _ = await w.ask(PROMPT)
            assert (status, answer["error"]["message"]) == (503, "told to say 503")
            assert sum(len(engine.seen) for engine in getattr(w, role)) == 2  # and no third, though there is one

    run(main)


@pytest.mark.parametrize(
    ("role", "spoil", "status"),
    [
        ("prefill", refuse, 503),
        ("prefill", drop, 502),
        ("decode", refuse, 503),
        ("decode", drop, 502),
    ],
)
def test_an_instance_without_another_is_an_error_in_openai_s_shape(role, spoil, status, caplog):
    async def main():
        async with world() as w:
            await spoil(getattr(w, role)[0])
            got, answer, headers = await w.ask(STREAM)
            assert got == status
            assert answer["error"].keys() == {"message", "type", "param", "code"}
            assert answer["error"]["code"] == status
            assert role in answer["error"]["message"]
            assert "127.0.0.1" not in answer["error"]["message"]  # not for clients, but
            assert getattr(w, role)[0].url in caplog.text
            assert "X-Request-Id" in headers
            if spoil is refuse:  # it is out from then on, and nobody is asked for nothing
                before = len(w.prefill[0].seen)
                assert (await w.ask(PROMPT))[0] == 503
                assert len(w.prefill[0].seen) == before
            await w.idle()

    run(main)


def test_everything_unreachable_is_a_503():
    async def main():
        async with world(prefill=2, decode=2) as w:
            for engine in w.prefill + w.decode:
                await engine.stop()
            for body in (PROMPT, STREAM):
                status, answer, _ = await w.ask(body)
                assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
            assert (await w.get("/v1/models"))[0] == 503

    run(main)


@pytest.mark.parametrize("spoil", [refuse, drop, say(503)], ids=["refuses", "drops", "503"])
def test_decode_prefills_alone_if_that_is_allowed_and_nobody_else_can(spoil):
    async def main():
        async with world(fallback_to_decode=True) as w:
            await spoil(w.prefill[0])
            for _ in range(2):
                status, answer, _ = await w.ask(PROMPT)
                assert (status, text(answer)) == (200, expected(PROMPT))
            assert w.decode[0].bodies == [PROMPT, PROMPT]
            assert (await w.counts())['pdkv_proxy_decode_only_total{reason="no_prefill"}'] == 2
            # What prefill refuses is refused, not tried elsewhere.
            await w.prefill[0].stop()
            await w.prefill[0].start()
            w.prefill[0].drop, w.prefill[0].status = False, 400
            await w.look()
            assert (await w.ask(PROMPT))[0] == 400

    run(main)


@pytest.mark.parametrize("answer", ["no json", "[]", '{"kv_transfer_params": 5}', "[" * 100_000])
def test_nonsense_from_prefill_is_a_502(answer):
    async def main():
        async with world() as w:
            w.prefill[0].answer = answer
            status, told, _ = await w.ask(PROMPT)
            assert (status, told["error"]["code"]) == (502, 502)
            assert w.decode[0].seen == []

    run(main)


@pytest.mark.parametrize("end", ["cut", "short"])
def test_a_stream_that_breaks_off_ends_with_an_error_event(end):
    async def main():
        async with world(decode=2) as w:
            for engine in w.decode:
                engine.end = end
            status, answer, _ = await w.ask(STREAM)
            assert status == 200
            *good, last = events(answer)  # every one of them parses: half an event is not passed on
            assert spoken(good) == expected(PROMPT)
            assert last["error"]["code"] == 502
            assert sum(len(engine.seen) for engine in w.decode) == 1  # the client had bytes: no other is tried
            assert (await w.counts())['pdkv_proxy_requests_total{endpoint="completions",outcome="broken"}'] == 1
            await w.idle()

    run(main)


def test_a_whole_answer_that_breaks_off_is_a_502_and_not_repeated():
    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/health" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        else:
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"choices"')
        await writer.drain()
        writer.close()

    async def main():
        async with world(decode=2) as w:
            for engine in w.decode:
                await engine.stop()
            servers = [await asyncio.start_server(handle, "127.0.0.1", engine.port) for engine in w.decode]
            status, answer, _ = await w.ask(PROMPT)
            assert (status, answer["error"]["code"]) == (502, 502)
            assert len(w.prefill[0].seen) == 1
            for server in servers:
                server.close()
                await server.wait_closed()

    run(main)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["whole", "stream"])
def test_silence_ends_at_the_idle_timeout(role, body):
    async def main():
        async with world(prefill=2, decode=2, idle_timeout_s=1.0) as w:
            for engine in getattr(w, role):
                engine.gate = asyncio.Event()
            # Nothing but the silence takes time: on a slow machine another leg might be late too.
            alone = {"use_beam_search": True} if role == "decode" else {}
            status, answer, _ = await w.ask(body | alone)
            assert (status, answer["error"]["type"]) == (504, "GatewayTimeoutError")
            [silent] = [engine for engine in getattr(w, role) if engine.seen]  # no other was made to wait as long
            await silent.gone.wait()
            await w.idle()

    run(main)


@follows_the_machine
def test_a_stream_that_falls_silent_ends_with_an_error_event(patience_s):
    async def main():
        async with world(idle_timeout_s=patience_s) as w:
            w.decode[0].gate, w.decode[0].words_first = asyncio.Event(), 2
            status, answer, _ = await w.ask(STREAM)
            assert status == 200
            assert len(events(answer)) == 3
            assert events(answer)[-1]["error"]["code"] == 504
            await w.decode[0].gone.wait()

    run(main)


def test_no_idle_timeout_where_there_is_none():
    async def main():
        async with world(idle_timeout_s=None) as w:
            w.decode[0].gate = asyncio.Event()
            asking = asyncio.create_task(w.ask(PROMPT))
            await w.decode[0].arrived.wait()
            w.decode[0].gate.set()
            assert (await asking)[0] == 200

    run(main)


@follows_the_machine
def test_an_instance_that_accepts_and_reads_nothing_is_silent_too(patience_s):
    async def main():
        held = []
        server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
        async with world(idle_timeout_s=patience_s, max_body_bytes=16 << 20) as w:
            w.instances[1].url = "http://127.0.0.1:" + str(server.sockets[0].getsockname()[1])
            status, _, _ = await w.ask(PROMPT | {"prompt": "x" * (8 << 20)})  # more than sockets hold
            assert status == 504
        server.close()
        for writer in held:
            writer.close()

    run(main)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404), ("POST", "/v1/models", 405), ("GET", "/", 404)],
)
def test_nothing_else_is_routed(method, path, status):
    async def main():
        async with world() as w, w.client.request(method, w.url + path, json={}) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == status
            assert w.prefill[0].seen == w.decode[0].seen == []

    run(main)


@pytest.mark.parametrize(
    ("raw", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"{}", "application/x-www-form-urlencoded", 415),
        (b'{"prompt": "' + b"x" * 2000 + b'"}', "application/json", 413),
    ],
)
def test_bad_requests_are_refused_in_openai_s_shape(raw, kind, status):
    async def main():
        async with world(max_body_bytes=1000) as w:
            async with w.client.post(w.url + "/v1/completions", data=raw, headers={"Content-Type": kind}) as response:
                assert response.status == status
                told = json.loads(await response.text())
                assert told["error"].keys() == {"message", "type", "param", "code"}
            assert w.prefill[0].seen == w.decode[0].seen == []
            assert (await w.counts())['pdkv_proxy_requests_total{endpoint="completions",outcome="refused"}'] == 1

    run(main)


def test_a_packed_body_is_refused_and_not_unpacked(monkeypatch):
    """A megabyte may unpack to a gigabyte."""

    def unpack(*_args, **_kwargs):
        raise AssertionError("it was unpacked")

    monkeypatch.setattr(aiohttp.http_parser.DeflateBuffer, "__init__", unpack)

    async def main():
        async with world() as w:
            headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            packed = gzip.compress(json.dumps(PROMPT | {"padding": "x" * 1_000_000}).encode())
            async with w.client.post(w.url + "/v1/completions", data=packed, headers=headers) as response:
                assert response.status == 415
                assert "packed" in (await response.json())["error"]["message"]
            assert w.prefill[0].seen == w.decode[0].seen == []
            headers["Content-Encoding"] = "identity"
            async with w.client.post(w.url + "/v1/completions", json=PROMPT, headers=headers) as response:
                assert response.status == 200

    run(main)


@pytest.mark.parametrize("name", [b"X-Request-Id", b"Authorization", b"Traceparent"])
def test_a_header_that_cannot_be_passed_on_is_the_client_s_fault(name):
    async def main():
        async with world() as w:
            reader, writer = await asyncio.open_connection(*w.url.removeprefix("http://").split(":"))
            head = (
                b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
            )
            writer.write(head + b"Content-Length: 2\r\n" + name + b": \xff\xfe\r\n\r\n{}")
            assert b" 400 " in await reader.readline()
            writer.close()
            assert all(instance.healthy for instance in w.instances)  # nobody is thought ill because of it
            assert w.prefill[0].seen == []

    run(main)


@pytest.mark.parametrize("encoding", ["deflate", "br", "zstd", "x-unknown"])
def test_a_body_that_is_packed_in_whatever_way_is_refused(encoding):
    async def main():
        async with world() as w:
            headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
            async with w.client.post(w.url + "/v1/completions", data=b"{not}", headers=headers) as response:
                assert response.status == 415
                assert w.prefill[0].seen == []

    run(main)


def test_an_instance_that_comes_back_takes_part_again():
    async def main():
        async with world() as w:
            await w.decode[0].stop()
            assert (await w.ask(PROMPT))[0] == 503
            await w.decode[0].start()
            w.instances[1].look.set()

            async def back():
                return (await w.get("/health"))[0] == 200

            await until(back)
            assert (await w.ask(PROMPT))[0] == 200

    run(main)
