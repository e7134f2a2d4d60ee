"""Requests of this process to a shelf of its own."""

from __future__ import annotations

from typing import Any

from pdkv.lookup_buffer.entry import Entry
from pdkv.lookup_buffer.selection import Selection, nothing_matched
from pdkv.lookup_buffer.shelf import Request, Shelf

__all__ = ["ask"]


class _Hit:
    """An entry that somebody in this process was given."""

    reference = None

    def __init__(self, shelf: Shelf, entry: Entry, matched: int) -> None:
        self._shelf, self._entry = shelf, entry
        self.matched, self.tensors = matched, entry.tensors

    def take(self) -> None:
        self._shelf.taken(self._entry)

    def give_back(self) -> None:
        self._shelf.give_back(self._entry)


def ask(shelf: Shelf, keys: Any | None, *, longest: bool, once: bool = False) -> Selection:
    """Makes a request; `keys` of `None` takes any entry, and `once` does not wait for one."""

    def begin() -> None:
        if not shelf.ask(request, once=once):
            selection.settle(nothing_matched(0))

    selection = Selection(begin, lambda: shelf.withdraw(request))
    request = Request(
        keys,
        longest=longest,
        deliver=lambda entry, matched: selection.settle(_Hit(shelf, entry, matched)),
        fail=selection.settle,
    )
    return selection
