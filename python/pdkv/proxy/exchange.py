"""One client's request, from its body to the last byte of the answer: which legs, in which order, and what is repeated.

A leg is repeated on another instance only while the client has nothing. A reference is good for one use: where a decode
instance may have seen it, the next one gets a fresh prefill; where no connection came about, the same reference.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientResponse, web

from pdkv.proxy import bodies, sse
from pdkv.proxy.answers import Answer, FailedError, failed
from pdkv.proxy.instances import Instance, Pool
from pdkv.proxy.legs import AWAY, Legs, LostError
from pdkv.proxy.metrics import Metrics
from pdkv.proxy.returns import Returns
from pdkv.proxy.settings import Settings

REQUEST_ID = "X-Request-Id"


@dataclass(frozen=True)
class Parts:
    """What all exchanges of a proxy share."""

    settings: Settings
    metrics: Metrics
    legs: Legs
    prefill: Pool
    decode: Pool
    returns: Returns


class ClientGoneError(Exception):
    """The client takes nothing any more."""


class _AgainError(Exception):
    """A leg that may be sent to another instance; `seen` where an instance may have taken the request in.

    With `blameless` the reason may be the KV that it was to load, and the same instance may be asked again.
    """

    def __init__(self, failure: FailedError, *, seen: bool, blameless: bool = False) -> None:
        super().__init__()
        self.failure = failure
        self.seen = seen
        self.blameless = blameless


class Exchange:
    """One request; `run` once."""

    def __init__(self, parts: Parts, request: web.Request, ask: bodies.Ask, headers: dict[str, str]) -> None:
        """Opens nothing.

        Args:
            parts: What it works with.
            request: The client's request, whose body was read.
            ask: That body.
            headers: What both legs are sent.
        """
        self._parts = parts
        self._request = request
        self._ask = ask
        self._headers = headers | {"Content-Type": "application/json"}
        self._start = time.monotonic()
        self._waits = True
        self._reloads = 1 if parts.settings.retries else 0  # how often what may be a failed load is repeated
        self._stream: web.StreamResponse | None = None
        self._params: dict[str, Any] | None = None  # of KV that a prefill instance keeps for this request
        self._fetched = False  # whether a decode instance has begun its answer, and so has that KV

    async def run(self) -> web.StreamResponse:
        """Gives the answer; a stream has been sent by then. Cancelling it closes the leg that runs.

        Raises:
            FailedError: What the client is to be told instead, by `end`.
            ClientGoneError: Nobody is left to be told.
        """
        decode, tried = self._parts.decode, list[Instance]()
        if not decode.healthy:
            raise failed(503, "no decode instance answers", "unavailable")  # before a prompt is prefilled for nobody
        due = splits = self._splits()
        try:
            while True:
                if due:
                    self._give_back()
                    self._params = await self._prefill()
                with decode.lease(self._ask.prompt_tokens, tried) as instance:
                    try:
                        return await self._decode(instance, self._params)
                    except _AgainError as again:
                        if again.blameless:
                            self._reloads -= 1
                            self._parts.metrics.retries.labels(decode.role).inc()
                        else:
                            self._another(decode, tried, instance, again)
                        due = splits and again.seen
        finally:
            self._give_back()

    async def end(self, failure: FailedError) -> web.StreamResponse:
        """Tells the client how it failed: by an event where a stream has begun, else by a whole answer."""
        if self._stream is None or not self._stream.prepared:
            return respond(failure.answer, self._told())
        await self._give(self._stream.write(sse.error_event(failure.answer)))
        await self._give(self._stream.write_eof())
        return self._stream

    def _give_back(self) -> None:
        """Lets the prefill instance free what no decode leg has fetched, nor will."""
        if self._params is not None and not self._fetched:
            self._parts.returns.give(self._params)
        self._params = None

    def _splits(self) -> bool:
        reason = self._ask.alone
        if reason is None and self._ask.prompt_tokens < self._parts.settings.skip_prefill_below_tokens:
            reason = "short"
        if reason is not None:
            self._parts.metrics.alone.labels(reason).inc()
        return reason is None

    async def _prefill(self) -> dict[str, Any] | None:
        """The parameters that a prefill instance answers with, or None where the decode instance is to prefill."""
        prefill, tried = self._parts.prefill, list[Instance]()
        try:
            while True:
                with prefill.lease(self._ask.prompt_tokens, tried) as instance:
                    try:
                        answer = await self._whole(instance, bodies.for_prefill(self._ask))
                        break
                    except _AgainError as again:
                        self._another(prefill, tried, instance, again)
        except FailedError:
            if not self._parts.settings.fallback_to_decode:
                raise
            self._parts.metrics.alone.labels("no_prefill").inc()
            return None
        if answer.status != 200:
            raise FailedError(answer, outcome(answer.status))
        self._parts.metrics.prefill_seconds.observe(time.monotonic() - self._start)
        return _params(answer)

    async def _whole(self, instance: Instance, body: bytes) -> Answer:
        """One prefill leg."""
        legs = self._parts.legs
        try:
            async with legs.send(instance, self._request.path, body, self._headers) as response:
                answer = await legs.whole(instance, response)
        except LostError as lost:
            raise _again_unless_late(lost) from lost
        if answer.status in AWAY:
            raise _AgainError(FailedError(answer, "failed"), seen=True)
        return answer

    async def _decode(self, instance: Instance, params: dict[str, Any] | None) -> web.StreamResponse:
        """One decode leg, and the answer that it gives the client."""
        legs, body, begun = self._parts.legs, bodies.for_decode(self._ask, params), False
        loads = params is not None and self._reloads > 0
        try:
            async with legs.send(instance, self._request.path, body, self._headers) as response:
                begun = response.status not in AWAY
                if begun and response.content_type == "text/event-stream":
                    return await self._relay(instance, response, loads=loads)
                answer = await legs.whole(instance, response)
        except LostError as lost:
            if begun:
                raise failed(504 if lost.late else 502, str(lost), "broken") from lost
            raise _again_unless_late(lost) from lost
        if answer.status in AWAY:
            raise _AgainError(FailedError(answer, "failed"), seen=True)
        if answer.status == 500 and loads:
            raise _AgainError(FailedError(answer, "failed"), seen=True, blameless=True)
        self._fetched = answer.status < 400
        self._first_byte()
        return respond(answer, self._told())

    async def _relay(self, instance: Instance, response: ClientResponse, *, loads: bool) -> web.StreamResponse:
        """Passes a stream through, event by event, as they arrive.

        With `loads` it begins with the first event that says something: until then the load may turn out to fail.
        """
        headers = self._told() | {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        self._stream = stream = web.StreamResponse(status=response.status, headers=headers)
        events, held = sse.Events(), b""
        while piece := await self._parts.legs.piece(instance, response):
            held += events.feed(piece)
            begins = sse.begins(held) if loads and not stream.prepared else sse.Begins.WELL
            if begins is sse.Begins.BADLY:
                raise _AgainError(failed(500, "the load failed", "failed"), seen=True, blameless=True)
            if begins is sse.Begins.WELL and held:
                await self._pass(stream, held)
                held = b""
        await self._pass(stream, held + events.flush())
        if not events.complete:
            raise LostError(instance, EOFError("the stream ended before it was complete"), sent=True, late=False)
        await self._give(stream.write_eof())
        return stream

    async def _pass(self, stream: web.StreamResponse, whole: bytes) -> None:
        """Passes events on, with the head before the first."""
        self._fetched = self._fetched or bool(whole)
        self._first_byte()
        if not stream.prepared:
            await self._give(stream.prepare(self._request))
        if whole:
            await self._give(stream.write(whole))

    async def _give(self, sending: Awaitable[object]) -> None:
        """Sends something to the client, which may be gone, or be there and take nothing."""
        try:
            async with asyncio.timeout(self._parts.settings.idle_timeout_s):
                await sending
        except (ConnectionError, TimeoutError) as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGoneError from error

    def _another(self, pool: Pool, tried: list[Instance], instance: Instance, again: _AgainError) -> None:
        """Counts a repetition, or ends the request where there is nobody left to try."""
        tried.append(instance)
        if len(tried) > self._parts.settings.retries or pool.next(tried) is None:
            raise again.failure from again
        self._parts.metrics.retries.labels(pool.role).inc()

    def _first_byte(self) -> None:
        if self._waits:
            self._waits = False
            self._parts.metrics.first_byte_seconds.observe(time.monotonic() - self._start)

    def _told(self) -> dict[str, str]:
        return {REQUEST_ID: self._headers[REQUEST_ID]}


def respond(answer: Answer, headers: dict[str, str]) -> web.Response:
    """An answer that is sent whole."""
    return web.Response(status=answer.status, body=answer.body, headers=headers | {"Content-Type": answer.content_type})


def outcome(status: int) -> str:
    """How a request is counted that was answered so."""
    if status < 400:
        return "ok"
    return "refused" if status < 500 else "failed"


def _again_unless_late(lost: LostError) -> Exception:
    """A leg that brought nothing: an instance that is gone may be replaced, one that is silent has had its time."""
    if lost.late:
        return failed(504, str(lost), "failed")
    return _AgainError(
        failed(502 if lost.sent else 503, str(lost), "failed" if lost.sent else "unavailable"), seen=lost.sent
    )


def _params(answer: Answer) -> dict[str, Any] | None:
    try:
        fields = json.loads(answer.body)
        params = fields.get("kv_transfer_params") or None
    except (ValueError, AttributeError, RecursionError):
        raise failed(502, "the prefill instance answered with no JSON object", "failed") from None
    if params is not None and not isinstance(params, dict):
        raise failed(502, "the prefill instance answered with `kv_transfer_params` that are no object", "failed")
    return params
