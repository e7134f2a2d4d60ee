"""Entries that wait for somebody, and requests that wait for an entry: who gets what, and in which order.

The rules of order are the index's. A request that nothing matches is parked; the first parked one that a new entry
matches gets it. An entry that was given out keeps its place until it is taken, and goes back there otherwise. Nothing
is called and nothing waits while the lock is held; threads, pipes and processes are not known here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from pdkv._core import LookupIndex
from pdkv.errors import ClosedError, PdkvError
from pdkv.lookup_buffer.entry import Entry
from pdkv.lookup_buffer.room import Room

__all__ = ["Request", "Shelf"]


class Request:
    """Somebody who wants an entry.

    Attributes:
        keys: The tokens to match, int64; `None` takes any entry.
        longest: Whether the longest match is wanted rather than the first in the order.
        deliver: Called once with the entry and the number of tokens that agree. Must not wait.
        fail: Called instead, once, when the shelf is closed.
    """

    __slots__ = ("deliver", "fail", "keys", "longest", "number", "serial")

    def __init__(
        self,
        keys: Any | None,
        *,
        longest: bool,
        deliver: Callable[[Entry, int], None],
        fail: Callable[[PdkvError], None],
    ) -> None:
        self.keys, self.longest, self.deliver, self.fail = keys, longest, deliver, fail
        self.serial = self.number = -1


class Shelf:
    """Entries of one kind.

    Args:
        room: To which the bytes of entries that are gone are given back. Whoever puts an entry has taken them.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._index, self._entries = LookupIndex(), dict[int, Entry]()
        # Those that wait, by their tokens; and those that take anything. Both in the order in which they came.
        self._waiting, self._parked = LookupIndex(), dict[int, Request]()
        self._anything = dict[int, Request]()
        self._serials = count()
        self._empty = threading.Condition(self._lock)
        self._finished = False

    def __len__(self) -> int:
        return len(self._index)

    def put(self, entry: Entry, operation: str) -> None:
        """Adds an entry at the end, or gives it to the first request that it matches."""
        with self._lock:
            if self._finished:
                raise _closed(operation)
            entry.number = self._index.insert(entry.keys)
            self._entries[entry.number] = entry
            pair = self._pair(entry)
        _deliver(entry, pair)

    def ask(self, request: Request, *, once: bool = False) -> bool:
        """Gives an entry to a request, now or as soon as one matches.

        Args:
            request: Who wants it.
            once: Whether it does not wait.

        Returns:
            Whether it was answered or waits; not so if nothing matches a request that does not wait.
        """
        with self._lock:
            found = self._find(request.keys, longest=request.longest)
            hopeless = found is None and self._finished
            if found is not None:
                self._take(found[0])
            elif not hopeless and not once:
                self._park(request)
        if found is not None:
            _deliver(found[0], (request, found[1]))
        elif hopeless:
            request.fail(_closed("drop_select"))
        return found is not None or hopeless or not once

    def withdraw(self, request: Request) -> bool:
        """Takes a request back; says whether it was still waiting."""
        with self._lock:
            return self._unpark(request)

    def peek(self, keys: Any | None, *, longest: bool) -> int | None:
        """How many tokens agree with the entry that a request would get now; `None` if it would wait."""
        with self._lock:
            found = self._find(keys, longest=longest)
        return None if found is None else found[1]

    def taken(self, entry: Entry) -> None:
        """Whoever it was given to has it."""
        with self._lock:
            freed = self._unpin(entry) + self._remove(entry)
        # Whoever waits for its end finds the room there.
        self._room.give(freed)
        entry.end("taken")

    def give_back(self, entry: Entry, *, pinned: bool = False) -> None:
        """Whoever it was given to does not have it: it goes back to its place, or to the first request that it matches.

        Args:
            entry: One that was delivered.
            pinned: Its tensors may still be read; `unpin` follows.
        """
        pair = None
        with self._lock:
            freed = 0 if pinned else self._unpin(entry)
            dropped = entry.doomed
            if dropped:
                freed += self._remove(entry)
            else:
                entry.out = False
                self._index.put_back(entry.number)
                pair = self._pair(entry)
        self._room.give(freed)
        if dropped:
            entry.end("dropped")
        _deliver(entry, pair)

    def unpin(self, entry: Entry) -> None:
        """The tensors of an entry that was given back are no longer read."""
        with self._lock:
            freed = self._unpin(entry)
        self._room.give(freed)

    def drop(self, entry: Entry) -> None:
        """Removes an entry; one that is given out just now goes when it would come back."""
        with self._lock:
            known = self._entries.get(entry.number) is entry
            if not known or entry.out:
                entry.doomed = True
                return
            freed = self._remove(entry)
        self._room.give(freed)
        entry.end("dropped")

    def drain(self, timeout_s: float | None) -> bool:
        """Waits until there is no entry left; says whether there is none."""
        with self._empty:
            return self._empty.wait_for(lambda: not self._entries, timeout_s)

    def finish(self) -> None:
        """Takes no more entries and ends all requests that none of those here matches, now and later."""
        with self._lock:
            self._finished = True
            requests = [*self._parked.values(), *self._anything.values()]
            for request in requests:
                self._unpark(request)
        for request in requests:
            request.fail(_closed("drop_select"))

    def close(self) -> None:
        """Drops all entries and ends all requests."""
        self.finish()
        with self._lock:
            for entry in self._entries.values():
                entry.doomed = True
            gone = [entry for entry in self._entries.values() if not entry.out]
            freed = sum(self._remove(entry) for entry in gone)
        self._room.give(freed)
        for entry in gone:
            entry.end("dropped")

    # What follows is called with the lock held.

    def _find(self, keys: Any | None, *, longest: bool) -> tuple[Entry, int] | None:
        if keys is None:
            number = self._index.front()
            return None if number is None else (self._entries[number], len(self._entries[number].keys))
        found = self._index.find(keys, longest=longest)
        return None if found is None else (self._entries[found[0]], found[1])

    def _pair(self, entry: Entry) -> tuple[Request, int] | None:
        """The first request that the entry matches, unparked; the entry is taken for it."""
        found = self._waiting.find(entry.keys)
        pair = None if found is None else (self._parked[found[0]], found[1])
        first = next(iter(self._anything.values()), None)
        if first is not None and (pair is None or first.serial < pair[0].serial):
            pair = (first, len(entry.keys))
        if pair is not None:
            self._unpark(pair[0])
            self._take(entry)
        return pair

    def _take(self, entry: Entry) -> None:
        self._index.take(entry.number)
        entry.out = True
        entry.pins += 1

    def _remove(self, entry: Entry) -> int:
        self._index.remove(entry.number)
        del self._entries[entry.number]
        if not self._entries:
            self._empty.notify_all()
        return self._unpin(entry)

    def _unpin(self, entry: Entry) -> int:
        """Returns how many bytes that frees."""
        entry.pins -= 1
        return 0 if entry.pins else entry.nbytes

    def _park(self, request: Request) -> None:
        request.serial = next(self._serials)
        if request.keys is None:
            self._anything[request.serial] = request
        else:
            request.number = self._waiting.insert(request.keys)
            self._parked[request.number] = request

    def _unpark(self, request: Request) -> bool:
        if request.keys is None:
            return self._anything.pop(request.serial, None) is not None
        if self._parked.get(request.number) is not request:
            return False
        del self._parked[request.number]
        self._waiting.remove(request.number)
        return True


_deliveries = threading.local()


def _deliver(entry: Entry, pair: tuple[Request, int] | None) -> None:
    """Gives an entry to a request. One that comes back at once goes to the next in a loop, however many there are."""
    if pair is None:
        return
    queue: deque[tuple[Entry, Request, int]] | None = getattr(_deliveries, "queue", None)
    if queue is not None:
        queue.append((entry, *pair))
        return
    queue = _deliveries.queue = deque([(entry, *pair)])
    try:
        while queue:
            entry, request, matched = queue.popleft()
            request.deliver(entry, matched)
    finally:
        del _deliveries.queue


def _closed(operation: str) -> ClosedError:
    return ClosedError("the buffer was closed", operation=operation)
