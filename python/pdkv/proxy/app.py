"""The HTTP face: which paths there are, what a request must look like, what is counted. Decides nothing about legs."""

from __future__ import annotations

import asyncio
import functools
import uuid
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web
from aiohttp.typedefs import Handler

from pdkv.proxy import bodies
from pdkv.proxy.answers import Answer, FailedError, error, failed
from pdkv.proxy.exchange import REQUEST_ID, ClientGoneError, Exchange, Parts, outcome, respond
from pdkv.proxy.instances import Instance, Pool, Role
from pdkv.proxy.legs import Legs, LostError
from pdkv.proxy.metrics import Metrics
from pdkv.proxy.probes import Probes
from pdkv.proxy.returns import Returns
from pdkv.proxy.settings import Settings

_ROUTED = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}

# A body up to this is read in a millisecond or two, less than a thread is worth.
_READ_HERE_BYTES = 64 << 10

# What goes on to the instances beside the body: who asks, and the names under which the request is traced.
_PASSED = ("Authorization", REQUEST_ID, "Traceparent", "Tracestate")


class Proxy:
    """A router with its instances; `start` and `stop` must run in one event loop.

    Attributes:
        app: What an HTTP server serves; a server must cancel the handlers of clients that leave.
    """

    def __init__(self, settings: Settings) -> None:
        """Takes checked settings; must be called in the event loop.

        Args:
            settings: What `Settings.checked` gave.
        """
        metrics = Metrics()
        self._parts = parts = Parts(
            settings=settings,
            metrics=metrics,
            legs=Legs(settings, metrics),
            prefill=Pool(Role.PREFILL, settings.prefill, metrics),
            decode=Pool(Role.DECODE, settings.decode, metrics),
            returns=Returns(metrics, settings.connect_timeout_s, settings.places()),
        )
        instances = parts.prefill.instances + parts.decode.instances
        self._probes = Probes(parts.legs.session, instances, settings.probe_interval_s)
        self._running: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        # One thread: several would take the interpreter from each other and from the loop.
        self._reader = ThreadPoolExecutor(1, "pdkv-proxy-bodies")
        self._draining = self._cutting = False
        self.app = web.Application(client_max_size=settings.max_body_bytes, middlewares=[_in_our_shape])
        for path in _ROUTED:
            self.app.router.add_post(path, self._complete)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)

    async def start(self) -> None:
        """Looks who is there, once, and then in the background."""
        await self._probes.start()

    async def drain(self, cut: asyncio.Event) -> None:
        """Takes no new requests and lets running ones end.

        Args:
            cut: Set to wait no longer. What runs then, or when the time for it is over, ends with an error.
        """
        self._draining = True
        if self._running:
            self._idle.clear()
            ends = [asyncio.create_task(event.wait()) for event in (self._idle, cut)]
            await asyncio.wait(ends, timeout=self._parts.settings.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
        self._cutting = True
        for task in self._running:
            task.cancel()

    async def stop(self) -> None:
        """Ends the probes, gives back what nobody will fetch, and closes all connections to instances."""
        await self._probes.stop()
        await self._parts.legs.close()
        await asyncio.to_thread(self._parts.returns.close)
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        """Answers `/v1/completions` and `/v1/chat/completions`."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        how = "cancelled"
        try:
            response, how = await self._answer(request, task)
        except ClientGoneError:
            return web.Response(status=499)  # nobody reads it
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle.set()
            self._parts.metrics.requests.labels(_ROUTED[request.path], how).inc()
        return response

    async def _answer(self, request: web.Request, task: asyncio.Task[object]) -> tuple[web.StreamResponse, str]:
        """The answer, and how it is counted."""
        request_id = f"pdkv-{uuid.uuid4().hex}"
        exchange: Exchange | None = None
        try:
            headers = _passed(request)
            request_id = headers.setdefault(REQUEST_ID, request_id)
            if self._draining:
                raise failed(503, "the proxy is shutting down", "unavailable")
            ask = await self._ask(await self._body(request), chat=request.path == "/v1/chat/completions")
            exchange = Exchange(self._parts, request, ask, headers)
            response = await exchange.run()
            return response, outcome(response.status)
        except FailedError as failure:
            told = failure
        except asyncio.CancelledError:
            if not self._cutting or request.transport is None:
                raise
            task.uncancel()  # the proxy ends, not the client: the client is told
            told = failed(503, "the proxy is shutting down", "unavailable")
        if exchange is None:
            return respond(told.answer, {REQUEST_ID: request_id}), told.outcome
        return await exchange.end(told), told.outcome

    async def _body(self, request: web.Request) -> bytes:
        packed = request.headers.get("Content-Encoding", "identity")
        if packed.strip().lower() not in ("", "identity"):
            raise failed(415, "the body is packed: send it as it is, without a `Content-Encoding`", "refused")
        if request.content_type != "application/json":
            # A web page may send anything else to another site without asking.
            raise failed(415, f"the content type is `{request.content_type}`, not `application/json`", "refused")
        try:
            async with asyncio.timeout(self._parts.settings.idle_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as large:
            most = self._parts.settings.max_body_bytes
            raise failed(413, f"the body is larger than `{most}` bytes", "refused") from large
        except web.RequestPayloadError as garbled:
            raise failed(400, "the body is not encoded as its headers say", "refused") from garbled
        except TimeoutError as late:
            raise failed(408, "the body did not arrive", "refused") from late

    async def _ask(self, raw: bytes, *, chat: bool) -> bodies.Ask:
        """Reads a body; a large one beside the loop, so that everybody else's requests go on."""
        if len(raw) <= _READ_HERE_BYTES:
            return bodies.read(raw, chat=chat)
        read = functools.partial(bodies.read, raw, chat=chat)
        return await asyncio.get_running_loop().run_in_executor(self._reader, read)

    async def _models(self, request: web.Request) -> web.Response:
        """Passes a decode instance's list of models through."""
        tried: list[Instance] = []
        try:
            headers = _passed(request)
            while True:
                with self._parts.decode.lease(0, tried) as instance:
                    tried.append(instance)
                    try:
                        async with self._parts.legs.send(instance, request.path, None, headers) as response:
                            return respond(await self._parts.legs.whole(instance, response), {})
                    except LostError:
                        continue
        except FailedError as failure:
            return respond(failure.answer, {})

    async def _health(self, _: web.Request) -> web.Response:
        """Well while a prompt can be prefilled in one place and decoded in another."""
        pools: tuple[Pool, ...] = (self._parts.prefill, self._parts.decode)
        well = all(pool.healthy for pool in pools) and not self._draining
        instances = {pool.role: {one.url: one.healthy for one in pool.instances} for pool in pools}
        return web.json_response({"status": "ok" if well else "unavailable", **instances}, status=200 if well else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        """The counters, for Prometheus."""
        return respond(self._parts.metrics.render(), {})


def _passed(request: web.Request) -> dict[str, str]:
    """The client's headers that go on to the instances.

    Raises:
        FailedError: One of them could not be sent.
    """
    headers = {name: request.headers[name] for name in _PASSED if request.headers.get(name)}
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise failed(400, f"the header `{name}` holds something else than printable ASCII", "refused")
    return headers


@web.middleware
async def _in_our_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the server's own refusals the shape of all others."""
    try:
        response: web.StreamResponse = await handler(request)
    except web.HTTPException as refusal:
        answer: Answer = error(refusal.status, f"`{request.method} {request.path}`: {refusal.reason}")
        allowed = {"Allow": refusal.headers["Allow"]} if "Allow" in refusal.headers else {}
        return respond(answer, allowed)
    return response
