"""Keeps the leases of requests that wait alive, from their arrival until they have what they came for.

One thread says when; the dialler's threads ask the owners, so one that is silent delays nobody else's. A lease that is
lost is lost quietly: the pull will be refused, and says why.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdkv.connectors.core.dial import Dialler, Job
from pdkv.connectors.core.load import Kit, own_references
from pdkv.connectors.core.work import ProducerAddress, Watch
from pdkv.errors import PdkvError, ReferenceUnknownError, ReferenceUsedError, StaleReferenceError, TransferTimeoutError

if TYPE_CHECKING:
    from pdkv.engine import Peer, Reference

__all__ = ["Leases"]

_log = logging.getLogger("pdkv.connectors")

# How long an owner may take to answer; it need do no more than look at a clock.
_ANSWER_S = 2.0
# Renewals in a lease's time.
_RATE = 3


class _Watched:
    """One request's leases at this rank."""

    __slots__ = ("asked", "ended", "lease_s", "missed", "producer", "references")

    def __init__(self, watch: Watch, references: tuple[Reference, ...]) -> None:
        self.producer, self.lease_s, self.references = watch.producer, watch.lease_s, references
        self.asked = self.ended = self.missed = False


class Leases:
    """All leases that this rank keeps alive."""

    def __init__(self, kit: Kit, dialler: Dialler) -> None:
        self._kit, self._dialler = kit, dialler
        self._watched = dict[str, _Watched]()
        self._due = list[tuple[float, int, _Watched]]()
        self._order = itertools.count()
        # Owners that did not answer, and until when they are left alone.
        self._silent = dict[ProducerAddress, float]()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, watch: Watch) -> None:
        """Keeps a request's leases alive from now on, and connects to their owner meanwhile. Never blocks."""
        try:
            references = own_references(watch.references, self._kit)
        except PdkvError as error:
            _log.debug("a lease can't be kept (%s): %s", error.kind, error.message)
            return
        references = tuple(reference for reference in references if reference.num_blocks)
        if not references or references[0].incarnation == self._kit.engine.incarnation:
            return
        watched = _Watched(watch, references)
        with self._changed:
            if self._closed:
                return
            older, self._watched[watch.request_id] = self._watched.get(watch.request_id), watched
            if older is not None:
                older.ended = True
            self._put(watched)
            if self._thread is None:
                self._start()
        if self._dialler.knows(watch.producer):
            # The first lease is young yet; what may take time is to get there again. One that was never reached waits
            # until its request has its turn: anybody can name places.
            self._submit(watched, lambda _: None, lambda _: None)

    def unwatch(self, request_id: str) -> None:
        """Leaves a request's leases alone from now on."""
        with self._changed:
            watched = self._watched.pop(request_id, None)
            if watched is not None:
                watched.ended = True

    def close(self, timeout_s: float) -> None:
        """Ends the thread; waits for it, for `timeout_s` at most."""
        with self._changed:
            self._closed = True
            for watched in self._watched.values():
                watched.ended = True
            self._watched.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="pdkv-leases", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # This process may have no more threads; the next watch tries again.
            _log.warning("no thread to keep leases with: %s", error)
        else:
            self._thread = thread

    def _put(self, watched: _Watched) -> None:
        heapq.heappush(self._due, (time.monotonic() + watched.lease_s / _RATE, next(self._order), watched))
        if self._due[0][2] is watched:
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                while self._due and (self._due[0][2].ended or self._due[0][0] <= now):
                    watched = heapq.heappop(self._due)[2]
                    if not watched.ended:
                        self._put(watched)
                        self._ask(watched)
                if not self._due:
                    break
                self._changed.wait(self._due[0][0] - now)
            self._thread = None

    def _ask(self, watched: _Watched) -> None:
        if not watched.asked:  # the last one may still wait in a queue
            watched.asked = True
            self._submit(watched, lambda peer: self._renew(watched, peer), lambda error: self._failed(watched, error))

    def _submit(self, watched: _Watched, run: Callable[[Peer], None], fail: Callable[[PdkvError], None]) -> None:
        deadline = time.monotonic() + min(self._kit.settings.connect_timeout, watched.lease_s)
        self._dialler.submit(
            watched.producer, Job(watched.references[0].incarnation, deadline, run, fail), urgent=False
        )

    def _renew(self, watched: _Watched, peer: Peer) -> None:
        timeout_s = min(_ANSWER_S, watched.lease_s / _RATE)
        with self._changed:
            watched.asked = False
            silent = self._silent.get(watched.producer, 0.0) > time.monotonic()
        for reference in watched.references:
            if watched.ended:
                return
            try:
                if silent:
                    raise TransferTimeoutError("the owner did not answer just now", operation="renew")
                peer.renew(reference, watched.lease_s, timeout_s=timeout_s)
            except PdkvError as error:
                self._failed(watched, error)
                if isinstance(error, TransferTimeoutError) and not silent:
                    self._leave_alone(watched.producer, timeout_s)
                return

    def _failed(self, watched: _Watched, error: PdkvError) -> None:
        with self._changed:
            watched.asked = False
            if isinstance(error, ReferenceUsedError):
                # The pull is over, though nobody here has looked at it yet.
                watched.ended = True
            if watched.ended:
                return
            self._kit.stats.count("num_failed_notifications")
            # What the owner doesn't know it may be about to export; when it is asked again it should know.
            early = isinstance(error, ReferenceUnknownError) and not watched.missed
            watched.missed |= early
            watched.ended = isinstance(error, StaleReferenceError) and not early
        _log.debug("a lease was not renewed (%s): %s", error.kind, error.message)

    def _leave_alone(self, producer: ProducerAddress, seconds: float) -> None:
        now = time.monotonic()
        with self._changed:
            self._silent = {other: end for other, end in self._silent.items() if end > now}
            self._silent[producer] = now + seconds
