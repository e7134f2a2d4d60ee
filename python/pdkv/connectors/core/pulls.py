"""Loads of this rank: each is the pulls of one request, one a cache, and is reported exactly once.

A load has ended when each of its transfers has ended and touches no memory any more; it failed if one of them did, and
then the others are cancelled. Whatever happens it ends by its deadline. Used by the LLM engine's thread and, to begin
what had to wait for a connection, by the dialler's. Knows no sockets.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdkv.connectors.core.declines import Declines
from pdkv.connectors.core.dial import Dialler, Job
from pdkv.connectors.core.load import Kit, Load
from pdkv.connectors.core.shown import shown
from pdkv.connectors.core.work import ProducerAddress, PullOrder, Refusal, Results
from pdkv.errors import (
    PdkvError,
    PeerError,
    ReferenceExpiredError,
    ReferenceMismatchError,
    StaleReferenceError,
    TransferCancelledError,
)

if TYPE_CHECKING:
    from pdkv.connectors.core.stats import Stats
    from pdkv.engine import Peer, Transfer

__all__ = ["Pulls"]

_log = logging.getLogger("pdkv.connectors")

_OPERATION = "load"
_NOBODY = ProducerAddress("", "", 0)


class Pulls:
    """All loads of one rank.

    Args:
        kit: What the rank's parts share.
        dialler: Who reaches producers.
        declines: Who tells them that nobody comes.
        on_ended: Called with the id of each request whose load has ended.
    """

    def __init__(self, kit: Kit, dialler: Dialler, declines: Declines, on_ended: Callable[[str], None]) -> None:
        self._kit, self._dialler, self._declines, self._on_ended = kit, dialler, declines, on_ended
        # Held for as long as posting takes, so that no transfer ends before it is known here.
        self._lock = threading.RLock()
        # By request, oldest first; the newest one's fate is told when all have ended. There is more than one only where
        # an id is used again before it was reported.
        self._open = dict[str, list[Load]]()
        self._transfers = dict[int, Load]()
        self._settling: list[tuple[Load, Transfer]] = []  # ended, but their memory is still touched
        self._waiting = deque[Load]()  # for a connection, by deadline
        self._ended = list[Load]()  # newest load of requests to report
        self._completions = kit.engine.completions()

    def begin(self, order: PullOrder) -> None:
        """Begins a load, at once if its producer is connected. Never blocks, raises nothing."""
        load = Load(order, time.monotonic() + self._kit.settings.transfer_timeout)
        with self._lock:
            self._enter(load)
            try:
                load.read(self._kit)
            except PdkvError as error:
                self._fail(load, error)
                return
            if not any(order.into):
                load.done.update(range(len(load.references)))
                self._end(load)
                self._declines.decline(order.producer, load.references)
                return
            peer = self._dialler.ready(order.producer, load.incarnation)
            if peer is not None and _may_post(load, peer):
                self._post(load, peer, again=True)
            else:
                self._dial(load)

    def refuse(self, refusal: Refusal) -> None:
        """Reports a load as failed that can't even be begun."""
        load = Load(PullOrder(refusal.request_id, _NOBODY, (), b"", (refusal.blocks,), (), 0), 0.0)
        with self._lock:
            self._enter(load)
            load.refused = True
            self._fail(load, PdkvError(refusal.reason, kind=refusal.kind, operation=_OPERATION))

    def give_up(self, order: PullOrder) -> None:
        """Reports a load as failed that met a bug."""
        blocks = tuple(block for group in order.into for block in group)
        self.refuse(Refusal(order.request_id, "internal", "the load could not be begun", blocks))

    def cancel(self, request_id: str) -> None:
        """Asks the load of a request to end. It is reported when it has, if it has not been yet."""
        with self._lock:
            for load in self._open.get(request_id, ()):
                self._cancel(load)

    def collect(self, results: Results) -> None:
        """Adds the requests whose load has ended. Takes time for what has ended only."""
        if not self._open and not self._ended:
            return
        with self._lock:
            for transfer_id in self._completions.take():
                load = self._transfers.pop(transfer_id, None)
                if load is not None:
                    cache, transfer = load.transfers[transfer_id]
                    self._settling.append((load, transfer))
                    self._note(load, cache, transfer)
            self._settling = [(load, transfer) for load, transfer in self._settling if not self._settle(load, transfer)]
            self._end_overdue()
            ended, self._ended = self._ended, []
        for load in ended:
            results.received.add(load.request_id)
            if load.error is not None:
                results.failed.add(load.request_id)
                results.failed_blocks.update(*load.order.into)

    def close(self, timeout_s: float) -> None:
        """Cancels all loads and waits until they touch no memory any more, for `timeout_s` at most."""
        end = time.monotonic() + timeout_s
        with self._lock:
            loads = [load for loads in self._open.values() for load in loads]
            for load in loads:
                self._cancel(load)
        for load in loads:
            for _, transfer in load.transfers.values():
                transfer.wait_quiesced(max(0.0, end - time.monotonic()))
        self._completions.close()

    def _enter(self, load: Load) -> None:
        loads = self._open.setdefault(load.request_id, [])
        loads.append(load)
        for older in loads[:-1]:
            # Whoever uses an id again doesn't want what was asked for under it before.
            self._cancel(older)

    def _dial(self, load: Load) -> None:
        self._waiting.append(load)
        job = Job(
            load.incarnation,
            load.deadline,
            run=lambda peer: self._reached(load, peer),
            fail=lambda error: self._unreached(load, error),
        )
        self._dialler.submit(load.order.producer, job, urgent=True)

    def _reached(self, load: Load, peer: Peer) -> None:
        try:
            # Not under the lock: the producer may have to be asked, and the LLM engine's thread waits for no answer.
            load.await_caches(peer, min(self._kit.settings.connect_timeout, load.time_left()))
        except PdkvError as error:
            self._unreached(load, error)
            return
        with self._lock:
            if not load.ended:
                self._post(load, peer, again=False)

    def _unreached(self, load: Load, error: PdkvError) -> None:
        with self._lock:
            self._fail(load, error)

    def _post(self, load: Load, peer: Peer, *, again: bool) -> None:
        try:
            unused = load.post(peer, self._kit)
        except PdkvError as error:
            if again and not load.left and isinstance(error, PeerError):
                # It was lost just now: whoever is there has a right to be asked.
                load.posted = False
                self._dial(load)
                return
            self._fail(load, error)
        else:
            self._declines.tell(peer, unused)
        finally:
            self._transfers.update(dict.fromkeys(load.transfers, load))

    def _note(self, load: Load, cache: int, transfer: Transfer) -> None:
        """Notes how a transfer ended."""
        error = transfer.error
        if error is None:
            load.done.add(cache)
        else:
            self._fail(load, error)
        with _harmless():
            _count_transfer(self._kit.stats, transfer, error)

    def _settle(self, load: Load, transfer: Transfer) -> bool:
        """Gives whether nothing touches the transfer's memory any more."""
        if not transfer.quiesced:
            return False
        load.left -= 1
        if not load.left:
            self._end(load)
        return True

    def _end_overdue(self) -> None:
        now = time.monotonic()
        while self._waiting and ((load := self._waiting[0]).ended or load.posted or load.deadline <= now):
            self._waiting.popleft()
            if not load.ended and not load.posted:
                try:
                    load.time_left()
                except PdkvError as error:
                    self._fail(load, error)

    def _cancel(self, load: Load) -> None:
        if not load.ended:
            load.cancelled = True
            self._fail(load, TransferCancelledError("the load is not wanted any more", operation=_OPERATION))

    def _fail(self, load: Load, error: PdkvError) -> None:
        """Notes the first reason why a load fails; it ends when its transfers have."""
        if load.ended:
            return
        if load.error is None:
            load.error = error
            load.cancel()
        if not load.left:
            self._end(load)

    def _end(self, load: Load) -> None:
        load.ended = True
        with _harmless():
            self._account(load)
        if load.cancelled:
            # Nobody else will come. After a failure somebody may, so there the lease decides.
            left = [reference for cache, reference in enumerate(load.references) if cache not in load.done]
            self._declines.decline(load.order.producer, left)
        loads = self._open[load.request_id]
        if all(each.ended for each in loads):
            del self._open[load.request_id]
            self._ended.append(loads[-1])
            self._on_ended(load.request_id)

    def _account(self, load: Load) -> None:
        error, stats = load.error, self._kit.stats
        if error is None:
            return
        if load.cancelled:
            stats.count("num_cancelled")
            return
        stats.count("num_recomputed_requests")
        if load.refused:
            stats.count("num_refused_references")
            return  # the scheduler side has logged it
        stats.count("num_failed_transfers")
        if isinstance(error, StaleReferenceError | ReferenceMismatchError):
            stats.count("num_refused_references")
        if isinstance(error, ReferenceExpiredError):
            stats.count("num_notifications_after_expiry")
        _log.warning("request `%s`: its load failed (%s): %s", shown(load.request_id), error.kind, error.message)


def _may_post(load: Load, peer: Peer) -> bool:
    try:
        return load.may_post(peer)
    except PdkvError:
        return False  # it was lost just now: whoever is there has a right to be asked


def _count_transfer(stats: Stats, transfer: Transfer, error: PdkvError | None) -> None:
    if error is None:
        figures = transfer.stats
        stats.transfer(
            seconds=1e-6 * (figures.plan_us + figures.post_us + figures.wire_us + figures.handover_us),
            post_seconds=1e-6 * (figures.plan_us + figures.post_us),
            nbytes=figures.bytes,
            descriptors=figures.runs,
            path=transfer.path.transport,
        )
    elif isinstance(error, StaleReferenceError) and transfer.destination == "invalid":
        stats.count("num_fenced_reads")


@contextmanager
def _harmless() -> Iterator[None]:
    """Nothing that only observes can cost a load."""
    try:
        yield
    except Exception:  # noqa: BLE001 - said above
        _log.exception("a load could not be counted")
