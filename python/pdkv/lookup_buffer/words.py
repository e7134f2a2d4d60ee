"""What the two ends of a lookup buffer say to each other: fixed little-endian layouts in the tag of a message.

A word is read whole or refused: another length, an unknown kind or an odd flag is an `IntegrityError`, after which the
connection ends. What the words mean is told in `server` and `remote`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from pdkv import errors
from pdkv.errors import IntegrityError, PdkvError, TransferError

__all__ = ["Kind", "Word", "error_of", "pack", "refusal", "unpack"]

# Kind, request, a number.
_HEAD = struct.Struct("<BQQ")
_MAX_TAIL = 48 << 10
_BY_KIND = {
    value.kind: value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, PdkvError) and "kind" in vars(value)
}


class Kind(IntEnum):
    """What a word is. The number on the wire never changes its meaning."""

    # From the one who asks. SELECT and PEEK carry the tokens as their tensor, or none for any entry.
    SELECT = 1
    PEEK = 2
    CANCEL = 3
    TAKEN = 4
    BACK = 5
    GET = 6
    EXISTS = 7
    # From the one who answers; one of these ends each request.
    HIT = 16
    MISS = 17
    REFUSED = 18
    END = 19


# How a SELECT or PEEK wants its entry, as bits of its number. ONCE is answered by a MISS instead of waiting.
LONGEST, BLOCKS, ONCE = 1, 2, 4


class Word(NamedTuple):
    """One word.

    Attributes:
        kind: What it is.
        request: Which request it is about; counted by the one who asks.
        number: HIT: how many tokens agree. SELECT and PEEK: `LONGEST`, `BLOCKS` and `ONCE`, added up.
        tail: HIT of blocks: the reference. GET and EXISTS: the key. REFUSED and END: kind of the error and its text.
    """

    kind: Kind
    request: int
    number: int = 0
    tail: bytes = b""


def pack(word: Word) -> bytes:
    """Writes a word."""
    return _HEAD.pack(word.kind, word.request, word.number) + word.tail


def unpack(tag: bytes) -> Word:
    """Reads a word.

    Raises:
        IntegrityError: It is none.
    """
    if not _HEAD.size <= len(tag) <= _HEAD.size + _MAX_TAIL:
        raise _garbage(f"`{len(tag)}` bytes long")
    kind, request, number = _HEAD.unpack_from(tag)
    if kind not in Kind._value2member_map_:
        raise _garbage(f"of kind `{kind}`")
    word = Word(Kind(kind), request, number, tag[_HEAD.size :])
    if word.kind in (Kind.SELECT, Kind.PEEK) and number > LONGEST | BLOCKS | ONCE:
        raise _garbage(f"with the flags `{number:#x}`")
    return word


def refusal(request: int, error: PdkvError) -> Word:
    """The word that says why a request failed."""
    text = f"{error.kind}\n{error.message}".encode()[:_MAX_TAIL]
    return Word(Kind.REFUSED, request, 0, text)


def error_of(word: Word) -> PdkvError:
    """The error that a REFUSED or END says."""
    kind, _, message = word.tail.decode(errors="replace").partition("\n")
    return _BY_KIND.get(kind, TransferError)(f"the other end says: {message}", operation="lookup")


def _garbage(what: str) -> IntegrityError:
    return IntegrityError(f"a word {what} came", operation="lookup", hint="the other end is no lookup buffer of ours")
