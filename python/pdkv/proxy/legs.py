"""One request to one instance: sends it, and says exactly how it failed. Neither chooses nor repeats.

Each leg has a connection of its own. Leaving the `async with` of an answer before its end closes the connection, which
is how an engine learns that nobody waits for it any more; and no leg fails on a kept connection that the engine had
just closed.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from pdkv.proxy.answers import Answer
from pdkv.proxy.instances import Instance
from pdkv.proxy.metrics import Metrics
from pdkv.proxy.settings import Settings

_LOG = logging.getLogger("pdkv.proxy")

# What a server in front of an engine says while the engine is away.
AWAY = frozenset({502, 503, 504})


class LostError(Exception):
    """An instance gave no answer, or not the whole of one.

    Attributes:
        sent: Whether the instance may have seen the request.
        late: Whether it was silent for too long, rather than gone.
    """

    def __init__(self, instance: Instance, error: BaseException, *, sent: bool, late: bool) -> None:
        """Puts the details into the log: a client is not told where the instances are."""
        what = "was silent for too long" if late else ("broke off" if sent else "accepted no connection")
        _LOG.warning("%s %s %s: %s", instance.role, instance.url, what, str(error) or type(error).__name__)
        super().__init__(f"the {instance.role} instance {what}")
        self.sent = sent
        self.late = late


class Legs:
    """Sends requests to instances over one HTTP client."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._metrics = metrics
        self._idle_timeout_s = settings.idle_timeout_s
        connect = settings.connect_timeout_s
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=connect, sock_connect=connect, sock_read=settings.idle_timeout_s
            ),
            headers={"Accept-Encoding": "identity", "User-Agent": "pdkv-proxy"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self.session.close()

    @asynccontextmanager
    async def send(
        self, instance: Instance, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request, `GET` without a body, and gives the answer once its head is there.

        Raises:
            LostError: There was none, or not the whole of it: `whole` and `piece` raise it too.
        """
        outcome = "cancelled"  # what it is unless it becomes something else
        try:
            method = "GET" if body is None else "POST"
            try:
                # The client's own time-out for silence starts when the body is sent, which may never be.
                async with asyncio.timeout(self._idle_timeout_s):
                    response = await self.session.request(
                        method,
                        instance.url + path,
                        data=None if body is None else io.BytesIO(body),  # sent in pieces; plain bytes block the loop
                        headers=headers,
                        allow_redirects=False,
                    )
            except (aiohttp.ClientError, OSError) as error:
                raise self._lost(instance, error) from error
            async with response:
                outcome = f"{response.status // 100}xx"
                try:
                    yield response
                except BaseException:
                    outcome = "cancelled"
                    raise
        except LostError as lost:
            outcome = "late" if lost.late else "lost"
            raise
        finally:
            self._metrics.legs.labels(instance.role, instance.url, outcome).inc()

    async def whole(self, instance: Instance, response: aiohttp.ClientResponse) -> Answer:
        """Reads an answer to its end."""
        try:
            body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(instance, error) from error
        kind = response.headers.get("Content-Type", "")
        # What can't stand in a header would keep the client from getting an answer at all.
        return Answer(response.status, body, kind if kind and kind.isprintable() else "application/octet-stream")

    async def piece(self, instance: Instance, response: aiohttp.ClientResponse) -> bytes:
        """Reads what has arrived of an answer, or waits for some; empty at its end."""
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(instance, error) from error

    @staticmethod
    def _lost(instance: Instance, error: BaseException) -> LostError:
        connecting = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
        late = isinstance(error, TimeoutError) and not connecting
        lost = LostError(instance, error, sent=not connecting, late=late)
        if not late:
            instance.suspect(str(lost), refused=connecting)
        return lost
