"""A mock of vLLM's HTTP server that is strict where vLLM is: references are single-use, a client that leaves aborts.

Its text depends on the prompt alone, so that any wrong hand-over is a wrong answer. What it is told to do wrong is set
by attributes; nothing happens by chance or by time. `python -m proxy.engine ROLE` runs one in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

KEYS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


def prompt_of(body: dict[str, Any]) -> str:
    return json.dumps(body.get("messages") or body.get("prompt"))


def word(prompt: str, at: int) -> str:
    """The token at a place of the answer to a prompt."""
    return hashlib.sha256(f"{prompt}{at}".encode()).hexdigest()[:6] + " "


def expected(body: dict[str, Any]) -> str:
    return "".join(word(prompt_of(body), at) for at in range(body.get("max_tokens") or 16))


@dataclass
class Seen:
    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]


@dataclass
class Engine:
    """One engine.

    Attributes:
        references: Prompts by reference, for all engines of a world; a reference leaves it when it is used.
        seen: What was asked, in order.
        aborted: Ids of requests whose client left.
        fail_loads: How many of the next loads of KV fail; those of a reference that is none always do.
        status: Answers everything with it, if set.
        answer: Answers everything with this text, if set.
        events: Answers everything with this stream, if set.
        well: What /health says; None is nothing at all.
        params: What a prefill answers as `kv_transfer_params`, if it isn't "mint".
        gate: Requests wait for it before they are answered.
        arrived: Set when a request waits at the gate or has sent `words_first` words.
        words_first: Words of a stream that are sent before the gate instead of after it.
        padding: Characters that each event carries beside its word.
        drop: Breaks the connection instead of answering.
        end: How a stream ends: "done", "cut" (broken in the middle of an event) or "short" (without `[DONE]`).
    """

    references: dict[str, str] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0
    fail_loads: int = 0
    status: int | None = None
    answer: str | None = None
    events: bytes | None = None
    well: int | None = 200
    params: Any = "mint"
    gate: asyncio.Event | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    words_first: int = 0
    end: str = "done"
    padding: int = 0
    drop: bool = False
    probes: int = 0
    port: int = 0
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [seen.body for seen in self.seen]

    async def start(self) -> Engine:
        """Listens, on the same port as before if there was one."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """Ends it; connections are refused from then on."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        self.probes += 1
        if self.well is None:
            await asyncio.Event().wait()
        return web.Response(status=self.well)

    async def _models(self, request: web.Request) -> web.Response:
        self.seen.append(Seen(request.path, {}, request.headers))
        if self.drop:
            request.transport.abort()
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]}, status=self.status or 200)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.seen.append(Seen(request.path, body, request.headers))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.append(request.headers["X-Request-Id"])
            self.gone.set()
            raise
        finally:
            self.running -= 1

    async def _wait(self) -> None:
        if self.gate is not None:
            self.arrived.set()
            await self.gate.wait()

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not (body.get("stream") and self.words_first):
            await self._wait()
        if self.drop:
            request.transport.abort()
            return web.Response()
        if self.answer is not None:
            return web.Response(text=self.answer, status=self.status or 200)
        if self.events is not None:
            return web.Response(body=self.events, content_type="text/event-stream")
        if self.status is not None:
            told = {"error": {"message": f"told to say {self.status}", "type": "E", "param": None, "code": self.status}}
            return web.json_response(told, status=self.status)
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill") and not self._load(params["pdkv"]["reference"], body):
            return await self._fail_load(request, body)
        minted = self._mint(body) if params.get("do_remote_decode") else None
        if body.get("stream"):
            return await self._stream(request, body)
        field_of = (
            (lambda text: {"message": {"content": text}}) if "messages" in body else (lambda text: {"text": text})
        )
        choices = [{"index": at, **field_of(expected(body))} for at in range(body.get("n") or 1)]
        return web.json_response({"id": "cmpl", "choices": choices, "kv_transfer_params": minted})

    def _load(self, reference: str, body: dict[str, Any]) -> bool:
        is_there = self.references.pop(reference, None) == prompt_of(body)
        self.fail_loads, fails = max(self.fail_loads - 1, 0), self.fail_loads > 0
        return is_there and not fails

    async def _fail_load(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """What vLLM says under its policy `fail`: of a stream the head, and of a chat the roles, are out by then."""
        error = {
            "error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
        }
        if not body.get("stream"):
            return web.json_response(error, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        roles = [
            {"choices": [{"index": at, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
            for at in range(body.get("n") or 1)
        ]
        for event in (roles if "messages" in body else []) + [error]:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _mint(self, body: dict[str, Any]) -> Any:
        if self.params != "mint":
            return self.params
        assert body["max_tokens"] == 1
        assert not body["stream"]
        reference = f"{self.port}-{len(self.seen)}-{len(self.references)}"
        self.references[reference] = prompt_of(body)
        return KEYS | {
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": str(self.port),
            "remote_request_id": f"cmpl-{reference}",
            "remote_num_tokens": 48,
            "pdkv": {"version": 1, "reference": reference},
        }

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for at in range(body.get("max_tokens") or 16):
            if at and at == self.words_first:
                await self._wait()
            text = word(prompt_of(body), at)
            choice = {"index": 0, "delta": {"content": text}} if "messages" in body else {"index": 0, "text": text}
            await response.write(
                b"data: " + json.dumps({"id": "x" * self.padding, "choices": [choice]}).encode() + b"\n\n"
            )
        if self.end == "cut":
            await response.write(b'data: {"id": "cmpl", "cho')
            await asyncio.sleep(0)
            request.transport.abort()
        elif self.end == "done":
            await response.write(b"data: [DONE]\n\n")
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response


async def _main() -> None:
    """Says its URL; a stuck one sends three words and no more. Ends by a signal."""
    engine = await Engine().start()
    if sys.argv[1] == "stuck":
        engine.gate, engine.words_first = asyncio.Event(), 3
    engine.params = None  # references are known to the engines of one process only
    sys.stdout.write(engine.url + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
