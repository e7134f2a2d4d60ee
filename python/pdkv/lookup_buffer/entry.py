"""One entry of a lookup buffer: tensors, or blocks of a paged cache, and what became of them.

An entry knows neither its order nor who waits for it. Its tensors are the caller's own: they are kept, not copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdkv.lookup_buffer.calm import Gate
from pdkv.lookup_buffer.tensors import check_sendable, keys_of, nbytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdkv.engine import Export

__all__ = ["Entry"]


class Entry:
    """What one `insert` gave.

    Attributes:
        tensors: What a consumer gets: tokens, roi, key, value, hidden; each may be `None`.
        keys: The tokens that count, int64.
        nbytes: What it adds to the bytes that the buffer holds.
        number: Its number in the index of its shelf, once it is there.
        pins: How many hold it: the shelf, and everybody whom it was sent to and who has not answered.
        out: Whether it was given to somebody who has not answered.
        doomed: Whether it is dropped rather than put back.
    """

    __slots__ = ("_ended", "_fate", "doomed", "keys", "nbytes", "number", "out", "pins", "tensors")

    def __init__(self, tensors: Sequence[Any | None], operation: str) -> None:
        self.tensors = list(tensors)
        self.keys = keys_of(self.tensors[0], self.tensors[1], operation)
        self.nbytes = sum(nbytes_of(tensor, operation) for tensor in self.tensors)
        for tensor in self.tensors:
            check_sendable(tensor)
        self.number = -1
        self.pins = 1
        self.out = self.doomed = False
        self._ended = Gate()
        self._fate = "waiting"

    def lend(self, lease_s: float) -> Export | None:  # noqa: ARG002 - for entries that are blocks
        """Makes what one consumer needs to fetch it beyond the tensors: nothing, for tensors."""
        return None

    @property
    def fate(self) -> str:
        """`waiting`, `taken` or `dropped`."""
        return self._fate

    def end(self, fate: str) -> None:
        """It left the buffer."""
        self._fate = fate
        self._ended.open()

    def wait(self, timeout_s: float | None) -> str:
        """Waits until it has left the buffer; returns its fate."""
        self._ended.wait(timeout_s)
        return self._fate
