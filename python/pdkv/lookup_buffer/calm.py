"""Calls that a signal must not cut in half.

Ctrl-C raises in the main thread, between any two steps of whatever runs there. What moves an entry from one hand into
another is therefore run by a thread that no signal reaches, and the main thread waits until it is done. What is called
is not known here.
"""

from __future__ import annotations

import os
import threading
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

__all__ = ["Gate", "calmly"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Job:
    __slots__ = ("_call", "_done", "_finished", "_outcome")

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._finished = False
        self._outcome: tuple[BaseException | None, Any] = (None, None)
        self._done = allocate_lock()
        self._done.acquire()

    def run(self) -> None:
        try:
            self._outcome = (None, self._call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            self._outcome = (error, None)
        self._finished = True
        self._done.release()

    def wait(self) -> Any:
        """What the call returned or raised; a signal's exception comes after that."""
        interrupt: BaseException | None = None
        while not self._finished:
            try:
                self._done.acquire()
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt
        failure, value = self._outcome
        if failure is not None:
            raise failure
        return value


def _work(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().run()


_jobs: SimpleQueue[_Job] | None = None


def _forget() -> None:
    global _jobs
    _jobs = None


# A forked child has no such thread.
os.register_at_fork(after_in_child=_forget)


def calmly(call: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Calls, and lets no signal interrupt the call; one that comes meanwhile is heard afterwards."""
    global _jobs
    if threading.get_ident() != threading.main_thread().ident:
        return call(*arguments, **options)  # signals raise in the main thread only
    if _jobs is None:
        jobs = SimpleQueue[_Job]()
        # One step, which is done or not; the machinery of `threading.Thread` could be met halfway.
        start_new_thread(_work, (jobs,))
        _jobs = jobs
    job = _Job(lambda: call(*arguments, **options))
    _jobs.put(job)
    result: _T = job.wait()
    return result


_opening = allocate_lock()


class Gate:
    """Opens once. Like `threading.Event`, but an interrupted wait leaves nothing behind in it."""

    __slots__ = ("_lock", "_open")

    def __init__(self) -> None:
        self._open = False
        self._lock = allocate_lock()
        self._lock.acquire()

    @property
    def is_open(self) -> bool:
        """Whether it has been opened."""
        return self._open

    def open(self) -> None:
        """Lets everybody through who waits or will; doing it twice is no error."""
        with _opening:
            if not self._open:
                self._open = True
                self._lock.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until it is open; says whether it is."""
        left = -1 if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
        if not self._open and self._lock.acquire(timeout=left):
            self._lock.release()  # for the next who waits
        return self._open
