"""Reaches producers in the background: whoever wants a connection leaves a job, and threads of this module run it.

A producer's jobs run one after another, those of different producers at once: one that is dead delays nobody else.
Requests name producers, and may name anything. So those that were never reached have some of the threads only, and few
for each host; one that was never waits for them. Threads start when there is work and end when there is none;
connections that nobody uses are closed. Knows what a job is no more than that it takes a connection or an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
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
# Of these, so many for producers that were never reached, and so many for those of one host.
MAX_UNPROVEN = 16
MAX_UNPROVEN_OF_HOST = 4
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

    __slots__ = ("admitted", "busy", "later", "line", "soon")

    def __init__(self, line: Line) -> None:
        self.line = line
        self.soon, self.later = deque[Job](), deque[Job]()
        self.busy = False  # waits for a thread, or is with one
        self.admitted = False  # counts among the unproven ones of its host

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
        self._unproven = deque[_Queue]()  # ready too, but were never reached
        self._running_unproven = 0
        self._of_host = Counter[str]()  # unproven ones that are ready or run
        self._held_back = dict[str, deque[_Queue]]()  # those beyond what a host may have
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
            self._unproven.clear()
            self._held_back.clear()
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

    def knows(self, producer: ProducerAddress) -> bool:
        """Whether a producer was ever reached."""
        queue = self._queues.get(producer)
        return queue is not None and queue.line.proven

    def _put(self, queue: _Queue, *, spare: int = 0) -> None:
        """Lets a queue wait for a thread, of which `spare` are about to be free; called with the lock held."""
        queue.busy = True
        host = queue.line.producer.host
        if queue.line.proven:
            self._ready.append(queue)
        elif self._of_host[host] < MAX_UNPROVEN_OF_HOST:
            self._of_host[host] += 1
            queue.admitted = True
            self._unproven.append(queue)
        else:
            self._held_back.setdefault(host, deque()).append(queue)
            return
        waiting = len(self._ready) + min(len(self._unproven), MAX_UNPROVEN - self._running_unproven)
        if self._resting + spare >= waiting or len(self._threads) >= MAX_THREADS:
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

    def _take(self) -> _Queue | None:
        """The next queue that may have a thread; called with the lock held."""
        if self._ready:
            return self._ready.popleft()
        if self._unproven and self._running_unproven < MAX_UNPROVEN:
            self._running_unproven += 1
            return self._unproven.popleft()
        return None

    def _give_back(self, queue: _Queue) -> None:
        """Takes a queue from its thread; called with the lock held."""
        queue.busy = False
        if queue.admitted:
            queue.admitted = False
            self._running_unproven -= 1
            host = queue.line.producer.host
            self._of_host[host] -= 1
            if not self._of_host[host]:
                del self._of_host[host]
            held_back = self._held_back.get(host)
            if held_back and not self._closed:
                self._put(held_back.popleft(), spare=1)
                if not held_back:
                    del self._held_back[host]
        if queue and not self._closed:
            self._put(queue, spare=1)

    def _work(self) -> None:
        try:
            while (taken := self._next()) is not None:
                queue, job = taken
                _run(queue.line, job)
                del taken, job  # a thread that rests keeps no request
                with self._changed:
                    self._give_back(queue)
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
                queue = self._take()
                if queue is not None:
                    return queue, queue.take()
                self._resting += 1
                woken = self._changed.wait(min(_LINGER_S, self._idle_s))
                self._resting -= 1
                # One that waited too long may have been woken all the same, and been told that it was not.
                if woken or self._ready or self._unproven:
                    continue
                # The last thread stays for as long as there is something to sweep up. Who goes is taken off the list
                # here, or two that rest would each count on the other.
                if len(self._threads) > 1 or not self._queues:
                    self._threads.discard(threading.current_thread())
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
