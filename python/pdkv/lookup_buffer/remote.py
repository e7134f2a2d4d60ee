"""The consumer's end: asks, hears the answers in a thread of its own, and says of each entry whether it has it.

Every request gets one last word. An entry that comes for a request that was called off is given back at once, whether
anybody calls or not. A word about a request that is not open is a forgery and ends the connection.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

from pdkv.errors import (
    ClosedError,
    IntegrityError,
    InternalError,
    PdkvError,
    PeerLostError,
    TransferCancelledError,
    TransferTimeoutError,
)
from pdkv.lookup_buffer.calm import Gate
from pdkv.lookup_buffer.selection import Selection, fresh, nothing_matched
from pdkv.lookup_buffer.server import MessagePipe
from pdkv.lookup_buffer.tensors import check_match
from pdkv.lookup_buffer.words import BLOCKS, LONGEST, ONCE, Kind, Word, error_of, pack, unpack

__all__ = ["Remote"]

_log = logging.getLogger("pdkv.lookup")
# A pipe that takes nothing for so long leads to a producer that does not listen.
_SEND_S = 30.0
# tokens, roi, key, value, hidden.
_TENSORS = 5
_Answered = Callable[["Word | PdkvError", list[Any]], None]


class _Hit:
    """An entry that came; the producer keeps its place until it hears of it."""

    def __init__(self, remote: Remote, word: Word, tensors: list[Any | None]) -> None:
        self.matched, self.tensors = word.number, tensors
        self.reference = word.tail.decode("ascii", "replace") or None
        self._remote, self._request = remote, word.request

    def take(self) -> None:
        self._remote.say(Word(Kind.TAKEN, self._request))

    def give_back(self) -> None:
        with suppress(PdkvError):  # of a connection that broke the producer learns as well
            self._remote.say(Word(Kind.BACK, self._request))


class Remote:
    """A connection to a producer's buffer.

    Args:
        pipe: To the producer.
        producer: What errors call it.
    """

    def __init__(self, pipe: MessagePipe, producer: str) -> None:
        self._pipe, self._producer = pipe, producer
        self._turn = threading.Lock()  # requests reach the producer in the order of their numbers
        self._lock = threading.Lock()
        self._open = dict[int, _Answered]()
        self._numbers = count()
        self._error: PdkvError | None = None
        self._thread = threading.Thread(target=self._listen, name="pdkv-lookup-ear", daemon=True)
        self._thread.start()

    def select(self, keys: Any | None, *, longest: bool, blocks: bool, once: bool = False) -> Selection:
        """Makes a request; `keys` of `None` takes any entry, and `once` does not wait for one."""
        number = -1

        def begin() -> None:
            nonlocal number
            number = self._ask(Kind.SELECT, keys, LONGEST * longest | BLOCKS * blocks | ONCE * once, b"", answered)

        selection = Selection(begin, lambda: self._cancel(number))

        def answered(answer: Word | PdkvError, tensors: list[Any]) -> None:
            if isinstance(answer, PdkvError):
                selection.settle(answer)
            elif answer.kind is Kind.HIT:
                if len(tensors) != _TENSORS or bool(answer.tail) != blocks:
                    raise IntegrityError(f"an entry of `{len(tensors)}` tensors came", operation="lookup")
                check_match(keys, tensors[0], tensors[1], answer.number)
                selection.settle(_Hit(self, answer, tensors))
            elif once:
                selection.settle(nothing_matched(0))
            elif selection.cancelled:
                pass  # and the producer heard that in time
            else:
                raise IntegrityError("a miss came that nobody asked for", operation="lookup")

        return selection

    def peek(self, keys: Any | None, *, longest: bool, blocks: bool, timeout_s: float | None) -> int | None:
        """How many tokens agree with what a request would get now; `None` if nothing matches."""
        word, _ = self.call(Kind.PEEK, keys, LONGEST * longest | BLOCKS * blocks, b"", timeout_s)
        return word.number if word.kind is Kind.HIT else None

    def call(
        self, kind: Kind, keys: Any | None, number: int, tail: bytes, timeout_s: float | None
    ) -> tuple[Word, list[Any | None]]:
        """Asks something that is answered at once.

        Raises:
            TransferTimeoutError: The answer did not come in time; it is ignored when it comes.
        """
        there = Gate()
        found = list[tuple[Word | PdkvError, list[Any]]]()

        def answered(answer: Word | PdkvError, tensors: list[Any]) -> None:
            found.append((answer, tensors))
            there.open()

        self._ask(kind, keys, number, tail, answered)
        if not there.wait(timeout_s):
            text = f"`{self._producer}` did not answer within `{timeout_s:g}` s"
            raise TransferTimeoutError(text, operation="lookup")
        answer, tensors = found[0]
        if isinstance(answer, PdkvError):
            raise fresh(answer)
        return answer, tensors

    def say(self, word: Word) -> None:
        """Says something that needs no answer."""
        self._pipe.send_message(pack(word), (), _SEND_S)

    @property
    def alive(self) -> bool:
        """Whether the connection holds."""
        return self._error is None

    def close(self) -> None:
        """Ends the connection: what was said is delivered, open requests end."""
        with self._lock:
            if self._error is None:
                self._error = ClosedError("the buffer was closed", operation="lookup")
        with suppress(PdkvError):  # what could not be delivered goes back to its place
            self._pipe.close()
        self._pipe.abort()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _ask(self, kind: Kind, keys: Any | None, number: int, tail: bytes, answered: _Answered) -> int:
        with self._turn:
            request = next(self._numbers)
            with self._lock:
                if self._error is not None:
                    raise fresh(self._error)
                self._open[request] = answered
            try:
                word = pack(Word(kind, request, number, tail))
                self._pipe.send_message(word, [] if keys is None else [keys], _SEND_S)
            except BaseException:
                with self._lock:
                    self._open.pop(request, None)
                raise
        return request

    def _cancel(self, number: int) -> None:
        if number < 0:
            return  # it was never asked
        with suppress(PdkvError):  # a connection that broke has ended the request already
            self.say(Word(Kind.CANCEL, number))

    def _listen(self) -> None:
        error: PdkvError = InternalError("the thread that hears the producer ended", operation="lookup")
        try:
            while True:
                tag, tensors = self._pipe.recv_message(None)
                word = unpack(tag)
                if word.kind is Kind.END:
                    raise error_of(word)
                with self._lock:
                    answered = self._open.get(word.request)
                if answered is None or word.kind < Kind.HIT:
                    text = f"a `{word.kind.name}` came for request `{word.request}`, which is not open"
                    raise IntegrityError(text, operation="lookup", context={"producer": self._producer})
                answered(error_of(word) if word.kind is Kind.REFUSED else word, tensors)
                # Only now: an answer that is refused ends its own request as well.
                with self._lock:
                    self._open.pop(word.request, None)
        except TransferCancelledError as reason:
            text = f"`{self._producer}` broke off: {reason.message}"
            error = PeerLostError(text, operation="lookup")
        except PdkvError as reason:
            error = reason
        finally:
            self._break(error)

    def _break(self, error: PdkvError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            error = self._error
            waiting, self._open = self._open, {}
        if isinstance(error, IntegrityError):
            _log.warning("the connection to `%s` is given up: %s", self._producer, error.message)
        self._pipe.abort()
        for answered in waiting.values():
            answered(error, [])
