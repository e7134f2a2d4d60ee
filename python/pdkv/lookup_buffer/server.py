"""The producer's end of one consumer: hears its requests, sends it entries, and knows what it has not confirmed.

An entry that was sent is the consumer's when it says so. If it says no, falls silent for too long, breaks the rules or
dies, the entry goes back to its place. One thread hears; whoever brings an entry sends it, which does not wait: the
pipe to a consumer takes what it is given and only refers to it. One that does not, because its consumer asks and never
listens, is cut off. No lock is held while anything is sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from pdkv.errors import (
    CapacityError,
    ClosedError,
    IntegrityError,
    LayoutError,
    PdkvError,
    PeerError,
    TransferCancelledError,
    TransferTimeoutError,
    UnsupportedError,
)
from pdkv.lookup_buffer.entry import Entry
from pdkv.lookup_buffer.shelf import Request, Shelf
from pdkv.lookup_buffer.tensors import keys_of
from pdkv.lookup_buffer.words import BLOCKS, LONGEST, ONCE, Kind, Word, pack, refusal, unpack

__all__ = ["MAX_OPEN", "MAX_TOKENS", "MessagePipe", "Session"]

_log = logging.getLogger("pdkv.lookup")
# Requests that one consumer may have open at once, answered ones that it has not confirmed included.
MAX_OPEN = 1024
# Tokens in all requests of one consumer that wait.
MAX_TOKENS = 1 << 24
# A pipe that takes nothing for so long is full of answers that nobody reads.
_SEND_S = 1.0
# How long a consumer that says other things may be late with its word on an entry: it may be among what is unread.
_GRACE_S = 1.0


class MessagePipe(Protocol):
    """What the ends need of `pdkv.Pipe`."""

    def send_message(self, tag: bytes, tensors: Any = (), timeout_s: float | None = None) -> None:
        """Sends bytes and tensors that belong together."""

    def recv_message(self, timeout_s: float | None = None) -> tuple[bytes, list[Any | None]]:
        """Receives the next ones."""

    def close(self, timeout_s: float | None = None) -> None:
        """Delivers what was sent, then ends both directions."""

    def abort(self) -> None:
        """Ends both directions at once and wakes whoever receives."""


class _Sent:
    """An entry on its way to the consumer, or there and not confirmed."""

    __slots__ = ("at", "entry", "export", "returned", "shelf")

    def __init__(self, shelf: Shelf, entry: Entry) -> None:
        self.shelf, self.entry = shelf, entry
        self.at = time.monotonic()
        self.returned = False  # cancelled: back on the shelf, but its tensors may still be read
        self.export: Any | None = None

    def end(self, *, taken: bool) -> None:
        if self.export is not None:
            # Also when it was taken: whoever says so has no more to read.
            with suppress(PdkvError):  # the engine may be closed, and then there is nothing to release
                self.export.release()
        if self.returned:
            self.shelf.unpin(self.entry)
        elif taken:
            self.shelf.taken(self.entry)
        else:
            self.shelf.give_back(self.entry)


class Session:
    """One consumer.

    Args:
        shelves: The shelf of tensors under `False`, that of blocks under `True`.
        pipe: To the consumer; its sending side takes any number of bytes without waiting.
        name: What log lines call the consumer.
        hold_s: How long a consumer may leave an entry unconfirmed; then it is cut off.
    """

    def __init__(self, shelves: Mapping[bool, Shelf], pipe: MessagePipe, name: str, hold_s: float) -> None:
        self._shelves, self._pipe, self._name, self._hold_s = shelves, pipe, name, hold_s
        self._lock = threading.Lock()
        self._parked = dict[int, tuple[Shelf, Request]]()
        self._sent = dict[int, _Sent]()
        self._cancelled = set[int]()
        self._last = -1
        self._over = False

    def run(self) -> None:
        """Serves the consumer until it leaves, is lost or is cut off; returns when all of its entries are back."""
        overdue = None
        try:
            while True:
                patience = self._patience()
                if patience != 0:
                    overdue = None
                elif overdue is None:
                    overdue = time.monotonic()
                elif time.monotonic() - overdue > _GRACE_S:
                    self._check_confirmations()
                try:
                    tag, tensors = self._pipe.recv_message(patience)
                except TransferTimeoutError:
                    self._check_confirmations()
                else:
                    self._hear(unpack(tag), tensors)
        except (PeerError, ClosedError, TransferCancelledError) as error:
            _log.debug("consumer `%s` left: %s", self._name, error.message)
        except PdkvError as error:
            _log.warning("consumer `%s` is cut off: %s", self._name, error.message)
        finally:
            self._end()

    def say_goodbye(self) -> None:
        """Tells the consumer that the buffer is closed; its own end then closes the pipe."""
        word = refusal(0, ClosedError("the buffer was closed"))._replace(kind=Kind.END)
        self._say(word)

    def cut(self) -> None:
        """Ends the session at once."""
        self._pipe.abort()

    def _hear(self, word: Word, tensors: list[Any | None]) -> None:
        if word.kind in (Kind.SELECT, Kind.PEEK):
            self._ask(word, tensors)
        elif word.kind is Kind.CANCEL:
            self._cancel(word.request)
        elif word.kind in (Kind.TAKEN, Kind.BACK):
            with self._lock:
                sent = self._sent.pop(word.request, None)
            forged = sent is None or (sent.returned and word.kind is Kind.TAKEN)
            if sent is not None:
                sent.end(taken=word.kind is Kind.TAKEN)
            if forged:
                raise IntegrityError(f"a `{word.kind.name}` for request `{word.request}` came", operation="lookup")
        else:
            raise IntegrityError(f"a consumer said `{word.kind.name}`", operation="lookup")

    def _ask(self, word: Word, tensors: list[Any | None]) -> None:
        # Counted upwards by the consumer: no request is confused with another.
        if word.request <= self._last or len(tensors) > 1:
            raise IntegrityError(f"request `{word.request}` came out of turn", operation="lookup")
        self._last = word.request
        keys = keys_of(tensors[0], None, "drop_select") if tensors and tensors[0] is not None else None
        shelf, longest = self._shelves[bool(word.number & BLOCKS)], bool(word.number & LONGEST)
        if word.kind is Kind.PEEK:
            matched = shelf.peek(keys, longest=longest)
            answer = Word(Kind.MISS, word.request) if matched is None else Word(Kind.HIT, word.request, matched)
            self._say(answer)
            return
        with self._lock:
            waiting = [request.keys for _, request in self._parked.values()]
            count, tokens = len(waiting) + len(self._sent), sum(_length(one) for one in [*waiting, keys])
        if count >= MAX_OPEN or tokens > MAX_TOKENS:
            error = CapacityError(f"`{count}` requests of this consumer are open, with `{tokens}` tokens")
            self._say(refusal(word.request, error))
            return
        request = Request(
            keys,
            longest=longest,
            deliver=lambda entry, matched: self._deliver(shelf, word.request, entry, matched),
            fail=lambda error: self._fail(word.request, error),
        )
        with self._lock:
            self._parked[word.request] = (shelf, request)
        if not shelf.ask(request, once=bool(word.number & ONCE)):
            with self._lock:
                del self._parked[word.request]
            self._say(Word(Kind.MISS, word.request))

    def _cancel(self, number: int) -> None:
        with self._lock:
            parked = self._parked.get(number)
        if parked is not None and parked[0].withdraw(parked[1]):
            with self._lock:
                del self._parked[number]
            self._say(Word(Kind.MISS, number))
            return
        with self._lock:
            sent = self._sent.get(number)
            if sent is None:
                # Answered already, or about to be delivered by another thread, which finds this note.
                if number in self._parked:
                    self._cancelled.add(number)
                return
            if sent.returned:
                return
            sent.returned = True
        if sent.export is not None:
            with suppress(PdkvError):
                sent.export.release()
        # The consumer will say BACK when it has read what is on its way; others need not wait for that.
        sent.shelf.give_back(sent.entry, pinned=True)

    def _deliver(self, shelf: Shelf, number: int, entry: Entry, matched: int) -> None:
        sent = _Sent(shelf, entry)
        with self._lock:
            self._parked.pop(number, None)
            unwanted = self._over or number in self._cancelled
            self._cancelled.discard(number)
            if not unwanted:
                self._sent[number] = sent
        if unwanted:
            sent.end(taken=False)
            self._say(Word(Kind.MISS, number))
            return
        try:
            export = entry.lend(self._hold_s)
        except PdkvError as error:
            # Blocks of a cache that is gone nobody can have.
            self._refuse(number, entry, error, doomed=not isinstance(error, CapacityError))
            return
        with self._lock:
            sent.export = export
            late = sent.returned
        if late and export is not None:
            # Cancelled meanwhile: others have it, and what is on its way is worth nothing.
            export.release()
        tail = b"" if export is None else export.reference.to_json().encode()
        try:
            self._pipe.send_message(pack(Word(Kind.HIT, number, matched, tail)), entry.tensors, _SEND_S)
        except TransferTimeoutError:
            self._pipe.abort()  # the hearing thread then gives everything back
        except PdkvError as error:
            # Nobody can have a tensor that can't be sent; that the pipe broke is not the entry's fault.
            self._refuse(number, entry, error, doomed=isinstance(error, (UnsupportedError, LayoutError)))

    def _refuse(self, number: int, entry: Entry, error: PdkvError, *, doomed: bool) -> None:
        if doomed:
            _log.warning("an entry is dropped: %s", error.message)
            entry.doomed = True
        with self._lock:
            sent = self._sent.pop(number, None)
        if sent is not None:
            sent.end(taken=False)
        self._say(refusal(number, error))

    def _fail(self, number: int, error: PdkvError) -> None:
        with self._lock:
            self._parked.pop(number, None)
        self._say(refusal(number, error))

    def _say(self, word: Word) -> None:
        try:
            self._pipe.send_message(pack(word), (), _SEND_S)
        except TransferTimeoutError:
            self._pipe.abort()
        except PdkvError as error:  # of a pipe that broke the hearing thread learns as well
            _log.debug("consumer `%s` could not be told: %s", self._name, error.message)

    def _patience(self) -> float | None:
        """How long to listen before somebody might have been silent for too long."""
        with self._lock:
            oldest = min((sent.at for sent in self._sent.values()), default=None)
            if oldest is None:
                return self._hold_s if self._parked else None
        return max(0.0, oldest + self._hold_s - time.monotonic())

    def _check_confirmations(self) -> None:
        with self._lock:
            late = [number for number, sent in self._sent.items() if sent.at + self._hold_s <= time.monotonic()]
        if late:
            raise TransferTimeoutError(
                f"what request `{late[0]}` got was neither taken nor given back within `{self._hold_s:g}` s",
                operation="lookup",
            )

    def _end(self) -> None:
        self._pipe.abort()
        with self._lock:
            self._over = True
            parked, self._parked = self._parked, {}
            sent, self._sent = self._sent, {}
        for shelf, request in parked.values():
            shelf.withdraw(request)
        for one in sent.values():
            one.end(taken=False)


def _length(keys: Any | None) -> int:
    return 0 if keys is None else len(keys)
