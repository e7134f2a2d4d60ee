"""Who is there, how busy, and who is next. Opens no connection: health is told by whoever asked.

One event loop uses it; nothing here blocks or waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

from pdkv.proxy.answers import failed
from pdkv.proxy.metrics import Metrics

_LOG = logging.getLogger("pdkv.proxy")


class Role(StrEnum):
    """What an instance is there for."""

    PREFILL = "prefill"
    DECODE = "decode"


class Instance:
    """One engine's HTTP server.

    Attributes:
        role: What it is there for.
        url: Its base URL.
        healthy: Whether it takes part. It does not until it first answers a probe.
        requests: Legs that run on it now.
        tokens: The estimated prompt tokens of these.
        look: Set when somebody has a reason to probe it now.
    """

    def __init__(self, role: Role, url: str, metrics: Metrics) -> None:
        self.role = role
        self.url = url
        self.healthy = False
        self.requests = 0
        self.tokens = 0
        self.look = asyncio.Event()
        self._metrics = metrics
        self._chosen = 0
        metrics.healthy.labels(role, url).set(0)
        self._show()

    def tell(self, *, healthy: bool, why: str) -> None:
        """Takes the instance in or out."""
        if healthy != self.healthy:
            _LOG.log(logging.INFO if healthy else logging.WARNING, "%s %s: %s", self.role, self.url, why)
        self.healthy = healthy
        self._metrics.healthy.labels(self.role, self.url).set(healthy)

    def suspect(self, why: str, *, refused: bool) -> None:
        """A leg failed on its connection: has it probed now, and takes it out where it accepted none at all."""
        if refused:
            self.tell(healthy=False, why=why)
        self.look.set()

    def load(self) -> tuple[int, int]:
        """How busy it is; the least goes first. Of equals the one that was chosen longest ago."""
        return (self.tokens if self.role is Role.PREFILL else self.requests, self._chosen)

    @contextmanager
    def busy(self, tokens: int, turn: int) -> Iterator[Instance]:
        """Counts a leg as long as it runs."""
        self._chosen = turn
        self.requests += 1
        self.tokens += tokens
        self._show()
        try:
            yield self
        finally:
            self.requests -= 1
            self.tokens -= tokens
            self._show()

    def _show(self) -> None:
        self._metrics.in_flight.labels(self.role, self.url).set(self.requests)
        self._metrics.in_flight_tokens.labels(self.role, self.url).set(self.tokens)


class Pool:
    """All instances of one role."""

    def __init__(self, role: Role, urls: Sequence[str], metrics: Metrics) -> None:
        self.role = role
        self.instances = tuple(Instance(role, url, metrics) for url in urls)
        self._turn = 0

    @property
    def healthy(self) -> bool:
        """Whether somebody takes part."""
        return any(instance.healthy for instance in self.instances)

    def next(self, without: Collection[Instance] = ()) -> Instance | None:
        """The least loaded instance that takes part, or None."""
        fit = [instance for instance in self.instances if instance.healthy and instance not in without]
        return min(fit, key=Instance.load) if fit else None

    @contextmanager
    def lease(self, tokens: int, without: Collection[Instance] = ()) -> Iterator[Instance]:
        """Chooses an instance and counts a leg of `tokens` prompt tokens on it.

        Raises:
            FailedError: Nobody takes part but those in `without`.
        """
        chosen = self.next(without)
        if chosen is None:
            raise failed(503, f"no {self.role} instance answers", "unavailable")
        self._turn += 1
        # A prompt of no tokens is a request too.
        with chosen.busy(max(tokens, 1), self._turn):
            yield chosen
