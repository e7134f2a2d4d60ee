"""Waits for transfers in asyncio without a thread: the event loop watches completions of the engine.

One watcher for each (engine, event loop) pair exists while somebody waits. It has completions of its own, so that
nobody else takes what would have woken it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, ClassVar

from pdkv.errors import ClosedError

if TYPE_CHECKING:
    from pdkv._core import Engine, Transfer

__all__ = ["wait"]


async def wait(transfer: Transfer) -> None:
    """Waits until `transfer` ended; `await transfer` does the same.

    Cancelling the waiting task does not cancel the transfer.

    Raises:
        PdkvError: The transfer failed or was cancelled; the class names the cause.
    """
    if not transfer.poll():
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        watcher = _Watcher.join(transfer.engine, loop, transfer, ended)
        try:
            await ended
        finally:
            watcher.leave(ended)
    transfer.wait(0)


class _Watcher:
    """The transfers of one engine that one event loop waits for."""

    _lock = threading.Lock()
    _all: ClassVar[dict[str, dict[asyncio.AbstractEventLoop, _Watcher]]] = {}

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self._waiting: dict[asyncio.Future[None], Transfer] = {}
        self._completions = engine.completions()
        loop.add_reader(self._completions, self._wake)

    @classmethod
    def join(
        cls, engine: Engine, loop: asyncio.AbstractEventLoop, transfer: Transfer, ended: asyncio.Future[None]
    ) -> _Watcher:
        """Adds a waiting future to the watcher of this loop, which is made if there is none."""
        with cls._lock:
            loops = cls._all.setdefault(engine.incarnation, {})
            watcher = loops.get(loop)
            if watcher is None:
                watcher = loops[loop] = cls(engine, loop)
            watcher._waiting[ended] = transfer
        # It may have ended before anybody watched.
        watcher._look()
        return watcher

    def leave(self, ended: asyncio.Future[None]) -> None:
        """Forgets a future; the last one ends the watcher."""
        with self._lock:
            del self._waiting[ended]
            if self._waiting:
                return
            self._loop.remove_reader(self._completions)
            self._completions.close()
            loops = self._all[self._engine.incarnation]
            del loops[self._loop]
            if not loops:
                del self._all[self._engine.incarnation]

    def _wake(self) -> None:
        try:
            self._completions.take()
        except ClosedError:
            # The engine is closed, and every transfer has ended: there is no more to wake for.
            self._loop.remove_reader(self._completions)
        self._look()

    def _look(self) -> None:
        for ended, transfer in list(self._waiting.items()):
            if transfer.poll() and not ended.done():
                ended.set_result(None)
