"""Reaches producers in the background: whoever wants a connection leaves a job, and threads of this module run it.

A producer's jobs run one after another, those of different producers at once: one that is dead delays nobody else, as
long as fewer than `MAX_THREADS` are. Threads start when there is work and end when there is none; connections that
nobody uses are closed. Knows what a job is no more than that it takes a connection or an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pdkv.connectors.core.line import Line
from pdkv.connectors.core.work import ProducerAddress
from pdkv.errors import ClosedError, InternalError, PdkvError, TransferTimeoutError

if TYPE_CHECKING:
    from pdkv.engine import Peer

__all__ = ["MAX_THREADS", "Dialler", "Job"]

_log = logging.getLogger("pdkv.connectors")

MAX_THREADS = 32
# How long a thread without work stays.
_LINGER_S = 5.0


class Job(NamedTuple):
    """What to do with a connection.

    Attributes:
        incarnation: The life of the engine that is wanted.
        deadline: On the monotonic clock; the job fails when it hasn't begun by then.
        run: Called with the connection. May block, for a short time.
        fail: Called instead, with the reason why there is none.
    """

    incarnation: str
    deadline: float
    run: Callable[[Peer], None]
    fail: Callable[[PdkvError], None]


class _Queue:
    """One producer's jobs. Those of requests that wait go before those that keep leases."""

    __slots__ = ("busy", "later", "line", "soon")

    def __init__(self, line: Line) -> None:
        self.line = line
        self.soon, self.later = deque[Job](), deque[Job]()
        self.busy = False  # waits for a thread, or is with one

    def take(self) -> Job:
        return self.soon.popleft() if self.soon else self.later.popleft()

    def __bool__(self) -> bool:
        return bool(self.soon or self.later)


class Dialler:
    """All producers of one rank.

    Args:
        make_line: Makes the line to a producer.
        idle_s: How long a connection that nobody uses stays. Longer than any transfer lasts.
    """

    def __init__(self, make_line: Callable[[ProducerAddress], Line], idle_s: float) -> None:
        self._make_line, self._idle_s = make_line, idle_s
        self._queues = dict[ProducerAddress, _Queue]()
        self._ready = deque[_Queue]()
        self._changed = threading.Condition()
        self._threads = set[threading.Thread]()
        self._resting = 0
        self._swept_at = time.monotonic()
        self._closed = False

    def ready(self, producer: ProducerAddress, incarnation: str) -> Peer | None:
        """The connection to a producer, if there is one. Never blocks."""
        queue = self._queues.get(producer)
        return None if queue is None else queue.line.ready(incarnation)

    def submit(self, producer: ProducerAddress, job: Job, *, urgent: bool) -> None:
        """Leaves a job. Never blocks; one of its two functions is called once, in another thread.

        Args:
            producer: Whom to reach.
            job: What to do then.
            urgent: Whether a request waits for it.
        """
        with self._changed:
            if not self._closed:
                queue = self._queues.get(producer)
                if queue is None:
                    queue = self._queues[producer] = _Queue(self._make_line(producer))
                (queue.soon if urgent else queue.later).append(job)
                if not queue.busy:
                    self._put(queue)
                return
        job.fail(_closed())

    def close(self, timeout_s: float) -> None:
        """Fails the jobs that wait, ends all connections, and waits for the threads, for `timeout_s` at most."""
        with self._changed:
            self._closed = True
            left = [job for queue in self._queues.values() for job in (*queue.soon, *queue.later)]
            lines = [queue.line for queue in self._queues.values()]
            threads = list(self._threads)
            self._queues.clear()
            self._ready.clear()
            self._changed.notify_all()
        for job in left:
            _fail(job, _closed())
        for line in lines:
            line.close()
        end = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        # One that a thread was just making.
        for line in lines:
            line.close()

    def _put(self, queue: _Queue) -> None:
        queue.busy = True
        self._ready.append(queue)
        if self._resting >= len(self._ready) or len(self._threads) >= MAX_THREADS:
            self._changed.notify()
            return
        thread = threading.Thread(target=self._work, name="pdkv-dial", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            # This process may have no more threads. Those that there are take it, or its deadline does.
            self._threads.discard(thread)
            _log.warning("no thread to reach a producer with: %s", error)

    def _work(self) -> None:
        try:
            while (taken := self._next()) is not None:
                queue, job = taken
                _run(queue.line, job)
                del taken, job  # a thread that rests keeps no request
                with self._changed:
                    queue.busy = bool(queue) and not self._closed
                    if queue.busy:
                        self._ready.append(queue)  # behind the others; this thread goes on
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _next(self) -> tuple[_Queue, Job] | None:
        """Waits for a job; `None` when this thread should end."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                self._sweep()
                if self._ready:
                    queue = self._ready.popleft()
                    return queue, queue.take()
                self._resting += 1
                woken = self._changed.wait(min(_LINGER_S, self._idle_s))
                self._resting -= 1
                # The last thread stays for as long as there is something to sweep up.
                if not woken and not self._ready and (len(self._threads) > 1 or not self._queues):
                    return None

    def _sweep(self) -> None:
        """Forgets producers that nobody wanted for a while; called with the lock held."""
        now = time.monotonic()
        if now - self._swept_at < min(_LINGER_S, self._idle_s):
            return
        self._swept_at = now
        for producer, queue in list(self._queues.items()):
            idle_s = self._idle_s if queue.line.peer is not None else min(_LINGER_S, self._idle_s)
            if not queue.busy and now - queue.line.used_at > idle_s:
                del self._queues[producer]
                queue.line.close()


def _run(line: Line, job: Job) -> None:
    try:
        if time.monotonic() >= job.deadline:
            raise TransferTimeoutError("no connection to the producer in time", operation="dial")
        job.run(line.reach(job.incarnation, job.deadline))
    except PdkvError as error:
        _fail(job, error)
    except Exception as bug:  # noqa: BLE001 - a bug of ours in one job must not end the others
        _log.exception("a job for a producer failed")
        _fail(job, InternalError(f"a job failed: {bug!r}", operation="dial"))


def _fail(job: Job, error: PdkvError) -> None:
    try:
        job.fail(error)
    except Exception:  # noqa: BLE001 - as above
        _log.exception("a job for a producer could not be failed")


def _closed() -> ClosedError:
    return ClosedError("the worker side was closed", operation="dial")
