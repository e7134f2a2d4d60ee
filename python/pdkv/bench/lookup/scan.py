"""A buffer without an index, as vLLM 0.8's `SimpleBuffer` is one: a look at every entry in turn until one matches.

The work for an entry is the same: both masks are applied, the shorter length is compared with `allclose`, and what
does not match goes to the end. Locks, threads and pipes are left out; they come on top there.
"""

from __future__ import annotations

import importlib
from collections import deque
from typing import Any


class Scan:
    """Entries in a circle.

    Attributes:
        name: What a row says.
    """

    def __init__(self, library: str) -> None:
        """Compares with that library's `allclose`."""
        module = importlib.import_module(library)
        self._close = module.allclose
        self._entries: deque[list[Any]] = deque()
        self.name = f"scan, {library} {module.__version__}"

    def __len__(self) -> int:
        return len(self._entries)

    def insert(self, *entry: Any) -> None:
        """Adds tokens, mask, and what is found by them."""
        self._entries.append(list(entry))

    def drop_select(self, tokens: Any, roi: Any) -> list[Any] | None:
        """Takes the first entry that matches; `None` if there is none."""
        for _ in range(len(self._entries)):
            if self._matched(self._entries[0], tokens, roi):
                return self._entries.popleft()
            self._entries.rotate(-1)
        return None

    def take(self, place: int) -> None:
        """Takes the entry at a place without a look at it: what `drop_select` leaves behind, not what it costs."""
        self._entries.rotate(-place)
        self._entries.popleft()

    def _matched(self, entry: list[Any], tokens: Any, roi: Any) -> int:
        ours, theirs = entry[0][entry[1]], tokens[roi]
        length = min(len(ours), len(theirs))
        return length if self._close(ours[:length], theirs[:length]) else 0
