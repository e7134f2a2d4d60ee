"""How many bytes a buffer may hold, and who is next to get some. It knows no entries."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from pdkv.errors import CapacityError, ClosedError, ConfigError, TransferTimeoutError
from pdkv.lookup_buffer.calm import Gate, calmly

__all__ = ["Room"]


class _Place:
    """Somebody who waits for room."""

    __slots__ = ("gate", "granted", "nbytes", "spent")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.gate = Gate()
        self.granted = self.spent = False


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
        self._queue: deque[_Place] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._used

    def admit(self, nbytes: int, enter: Callable[[], None], timeout_s: float | None, operation: str) -> None:
        """Takes bytes, blocks until they are there, and lets somebody in who has them from then on.

        Args:
            nbytes: How many.
            enter: Called once they are there. If it raises they are given back.
            timeout_s: How long to wait.
            operation: Whom errors name.

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
        place = _Place(nbytes)
        try:
            calmly(self._queue_up, place, enter, operation)
            if not place.spent:
                place.gate.wait(timeout_s)
                calmly(self._go_in, place, enter, operation)
            if not place.spent:
                raise TransferTimeoutError(
                    f"no room for `{nbytes}` bytes within `{timeout_s:g}` s: `{self._used}` of "
                    f"`{self.max_bytes:.0f}` are taken",
                    operation=operation,
                    hint="consumers make room by selecting; or make the buffer with a larger `max_bytes`",
                )
        finally:
            if not place.spent:
                calmly(self._leave, place)

    def give(self, nbytes: int) -> None:
        """Gives bytes back."""
        if nbytes:
            with self._lock:
                self._used -= nbytes
                self._grant()

    def close(self) -> None:
        """Ends all waits."""
        with self._lock:
            self._closed = True
            for place in self._queue:
                place.gate.open()

    def _queue_up(self, place: _Place, enter: Callable[[], None], operation: str) -> None:
        with self._lock:
            self._queue.append(place)
            self._grant()
        self._go_in(place, enter, operation)

    def _go_in(self, place: _Place, enter: Callable[[], None], operation: str) -> None:
        if self._closed:
            raise ClosedError("the buffer was closed", operation=operation)
        if place.granted:
            enter()
            place.spent = True

    def _leave(self, place: _Place) -> None:
        with self._lock:
            if place.spent:
                return  # it went in while its caller was interrupted
            if place.granted:
                self._used -= place.nbytes
            elif place in self._queue:  # it may have been interrupted before it was
                self._queue.remove(place)
            self._grant()

    def _grant(self) -> None:
        """Gives what there is to those who wait; called with the lock held."""
        while self._queue and self._used + self._queue[0].nbytes <= self.max_bytes:
            place = self._queue.popleft()
            self._used += place.nbytes
            place.granted = True
            place.gate.open()
