"""How many bytes a buffer may hold, and who is next to get some. It knows no entries."""

from __future__ import annotations

import threading
from collections import deque

from pdkv.errors import CapacityError, ClosedError, ConfigError, TransferTimeoutError

__all__ = ["Room"]


class Room:
    """Bytes that are handed out in the order in which they were asked for: a large item is not overtaken for ever.

    Args:
        max_bytes: How many there are.
    """

    def __init__(self, max_bytes: float) -> None:
        if not max_bytes > 0:
            raise ConfigError(f"`max_bytes` is `{max_bytes}`", operation="lookup", hint="give a positive number")
        self.max_bytes = max_bytes
        self._used = 0
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._used

    def take(self, nbytes: int, timeout_s: float | None, operation: str) -> None:
        """Takes bytes; blocks until they are there.

        Raises:
            CapacityError: There will never be so many.
            TransferTimeoutError: They were not there in time.
            ClosedError: The buffer was closed.
        """
        if nbytes > self.max_bytes:
            raise CapacityError(
                f"`{nbytes}` bytes can never fit into a buffer of `{self.max_bytes:.0f}` bytes",
                operation=operation,
                retryable=False,
                hint="make the buffer with a larger `max_bytes`",
            )
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                ready = self._changed.wait_for(
                    lambda: self._closed or (self._queue[0] is ticket and self._used + nbytes <= self.max_bytes),
                    timeout_s,
                )
                if self._closed:
                    raise ClosedError("the buffer was closed", operation=operation)
                if not ready:
                    raise TransferTimeoutError(
                        f"no room for `{nbytes}` bytes within `{timeout_s:g}` s: `{self._used}` of "
                        f"`{self.max_bytes:.0f}` are taken",
                        operation=operation,
                        hint="consumers make room by selecting; or make the buffer with a larger `max_bytes`",
                    )
                self._used += nbytes
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def give(self, nbytes: int) -> None:
        """Gives bytes back."""
        if nbytes:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
