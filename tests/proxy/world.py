"""A proxy in this process between mock engines and a client, all in one event loop."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from pdkv.proxy.app import Proxy
from pdkv.proxy.instances import Instance
from pdkv.proxy.serve import make_runner
from pdkv.proxy.settings import Settings
from proxy.engine import Engine

PATIENCE_S = 240.0  # for what must happen; nothing is judged by how soon


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a test that is a coroutine."""
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@dataclass
class World:
    prefill: list[Engine]
    decode: list[Engine]
    proxy: Proxy
    client: aiohttp.ClientSession
    url: str

    async def ask(self, body: Any, *, chat: bool = False, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """Status, body (parsed if it is JSON) and headers of an answer."""
        path = "/v1/chat/completions" if chat else "/v1/completions"
        data = io.BytesIO(json.dumps(body).encode())
        headers["Content-Type"] = "application/json"
        async with self.client.post(self.url + path, data=data, headers=headers) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text, response.headers

    async def get(self, path: str) -> tuple[int, str]:
        async with self.client.get(self.url + path) as response:
            return response.status, await response.text()

    async def look(self) -> None:
        """Has every instance probed now."""
        for instance in self.instances:
            await self.proxy._probes.probe(instance)

    @property
    def instances(self) -> list[Instance]:
        parts = self.proxy._parts
        return [*parts.prefill.instances, *parts.decode.instances]

    async def counts(self) -> dict[str, float]:
        """All series that the proxy shows, by their text."""
        lines = (await self.get("/metrics"))[1].splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def idle(self) -> None:
        """Waits until no leg is counted as running."""
        await until(lambda: self._nothing_runs())

    async def _nothing_runs(self) -> bool:
        counts = await self.counts()
        return not any(value for name, value in counts.items() if "_in_flight_" in name)


async def until(true: Callable[[], bool | Awaitable[bool]]) -> None:
    """Waits until something is true; the test's own patience ends it."""
    while True:
        answer = true()
        if await answer if isinstance(answer, Awaitable) else answer:
            return
        await asyncio.sleep(0.005)


@asynccontextmanager
async def world(prefill: int = 1, decode: int = 1, **settings: Any) -> AsyncIterator[World]:
    """Engines, a proxy that knows them, and a client."""
    references: dict[str, str] = {}
    engines = [await Engine(references=references).start() for _ in range(prefill + decode)]
    first, second = engines[:prefill], engines[prefill:]
    # Probes come when they are wanted, not in between, and a slow machine takes nobody out.
    told = {"probe_interval_s": 60.0, "connect_timeout_s": 60.0, "port": 0} | settings
    urls = {"prefill": tuple(one.url for one in first), "decode": tuple(one.url for one in second)}
    proxy = Proxy(Settings(**urls, **told).checked())
    runner = make_runner(proxy, shutdown_timeout_s=0.01)
    await runner.setup()
    await proxy.start()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    try:
        yield World(first, second, proxy, client, f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        for engine in engines:
            if engine.gate is not None:
                engine.gate.set()
        await client.close()
        await runner.cleanup()
        await proxy.stop()
        for engine in engines:
            await engine.stop()


def events(text: str) -> list[Any]:
    """The events of a stream, parsed; the last is "[DONE]" if it was complete."""
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def spoken(stream: list[Any]) -> str:
    """The text of a stream's events."""
    choices = [event["choices"][0] for event in stream if isinstance(event, dict) and "choices" in event]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)
