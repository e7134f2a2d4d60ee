"""A request for an entry, from the side that asked: it waits, it gets a hit or an error, it can be called off.

An entry is out of the buffer from the hit on, but it is only taken when the one who asked has it in hand; in between it
can be given back, and is, by everything that ends the request in another way. How the hit came here is not known.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from pdkv.errors import ClosedError, PdkvError, TransferCancelledError, TransferTimeoutError
from pdkv.lookup_buffer.calm import Gate, calmly

__all__ = ["Hit", "Selection", "fresh", "nothing_matched"]

_OPERATION = "drop_select"


class Hit(Protocol):
    """An entry that was found and is out of the buffer until one of the two methods is called."""

    @property
    def matched(self) -> int:
        """How many tokens agree."""

    @property
    def tensors(self) -> list[Any | None]:
        """tokens, roi, key, value, hidden."""

    @property
    def reference(self) -> str | None:
        """What names the blocks of an entry that is blocks."""

    def take(self) -> None:
        """It is here: it leaves the buffer for good."""

    def give_back(self) -> None:
        """It goes back to its place."""


def fresh(error: PdkvError) -> PdkvError:
    """A copy to raise: one object that is raised again and again keeps every stack that it went through."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again


def nothing_matched(timeout_s: float | None) -> TransferTimeoutError:
    """What a miss is."""
    return TransferTimeoutError(
        f"no entry matched within `{timeout_s:g}` s",
        operation=_OPERATION,
        hint="insert() of the producer ends the wait; peek() asks and takes nothing",
    )


class Selection:
    """A `drop_select` that goes on by itself; made by `LookupBuffer.select`.

    Wait for it or cancel it: an entry that nobody fetches is kept from others. In a `with` block it is cancelled at the
    end unless the entry was taken. All methods may be called from any thread.
    """

    def __init__(self, begin: Callable[[], None], withdraw: Callable[[], object]) -> None:
        self._begin, self._withdraw = begin, withdraw
        self._lock = threading.Lock()
        self._gate = Gate()
        self._answer: Hit | PdkvError | None = None
        self._state = "open"  # then `taken` or `cancelled`

    def start(self) -> Self:
        """Asks. Whoever is interrupted in this cancels."""
        calmly(self._begin)
        return self

    def settle(self, answer: Hit | PdkvError) -> None:
        """Brings the answer; called once, from whatever thread has it."""
        with self._lock:
            late = self._state != "open"
            if not late:
                self._answer = answer
        if late and not isinstance(answer, PdkvError):
            answer.give_back()
        self._gate.open()

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._gate.is_open

    @property
    def cancelled(self) -> bool:
        """Whether it was called off before the entry was taken."""
        return self._state == "cancelled"

    def hit(self, timeout_s: float | None = None) -> Hit:
        """Waits for the entry, without taking it.

        Raises:
            As `wait`.
        """
        if not self._gate.wait(timeout_s):
            raise nothing_matched(timeout_s)
        with self._lock:
            if self._state == "cancelled":
                raise TransferCancelledError("the request was cancelled", operation=_OPERATION)
            if self._answer is None:
                raise ClosedError("the entry was taken before", operation=_OPERATION)
            if isinstance(self._answer, PdkvError):
                raise fresh(self._answer)
            return self._answer

    def take(self) -> None:
        """Takes the entry that `hit` returned: it leaves the buffer for good.

        Raises:
            TransferCancelledError: It was cancelled meanwhile.
            PeerLostError: The producer could not be told, and keeps the entry.
        """
        calmly(self._take)

    def _take(self) -> None:
        with self._lock:
            hit = self._answer
            if self._state != "open" or hit is None or isinstance(hit, PdkvError):
                raise TransferCancelledError("the request was cancelled", operation=_OPERATION)
            self._state, self._answer = "taken", None
        hit.take()

    def wait(self, timeout_s: float | None = None) -> list[Any | None]:
        """Waits for the entry and takes it.

        Returns:
            tokens, roi, key, value, hidden, as they were inserted.

        Raises:
            TransferTimeoutError: There was none in time; the request goes on.
            TransferCancelledError: It was cancelled.
            ClosedError: The buffer was closed, or the entry was taken before.
            PeerLostError: The producer is gone.
        """
        tensors = self.hit(timeout_s).tensors
        self.take()
        return tensors

    def cancel(self) -> None:
        """Calls it off; does nothing once the entry was taken.

        Whoever waits gets `TransferCancelledError`, and an entry that was found goes back to its place.
        """
        calmly(self._cancel)

    def _cancel(self) -> None:
        with self._lock:
            if self._state != "open":
                return
            answer, self._answer, self._state = self._answer, None, "cancelled"
        self._gate.open()
        if answer is None:
            self._withdraw()
        elif not isinstance(answer, PdkvError):
            answer.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.cancel()
