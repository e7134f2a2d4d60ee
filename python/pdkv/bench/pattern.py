"""Bytes that say where they come from, so that a wrong one can be traced.

A page is the bytes of one block in one layer. Word `w` (64 bits, little endian) of a page is
`key ^ (w * GOLDEN)`, where `key` is a bijective mix of (seed, stamp, layer, block). Nothing is random:
from any two neighbouring words of a page the mix can be undone, which names the page they were made for.
The stamp changes with every measured copy, so bytes left over from an earlier one never pass.

This module is the reference in numpy; `fill` and `find_wrong` use the native twin when they are given one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
CANARY_STAMP = 0xFFF  # pages outside the table carry it; no measured copy uses it
_MUL1, _MUL2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_INV1, _INV2 = np.uint64(pow(int(_MUL1), -1, 1 << 64)), np.uint64(pow(int(_MUL2), -1, 1 << 64))
_CHUNK_BYTES = 4 << 20
_TRACED = 5


@dataclass(frozen=True, slots=True)
class Origin:
    """Which page some bytes were made for: seed (8 bits of it), stamp, layer and block."""

    seed: int
    stamp: int
    layer: int
    block: int

    def __str__(self) -> str:
        return f"layer {self.layer} block {self.block} stamp {self.stamp} seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Wrong:
    """One page that holds something else than it should.

    Attributes:
        position: Index of the page in the list that was checked.
        first_byte: Offset of the first wrong byte in the page.
        wrong_bytes: How many bytes of it differ.
        expected: What the page should hold.
        found: What the bytes there were made for and the byte offset they belong to, if they can be traced.
    """

    position: int
    first_byte: int
    wrong_bytes: int
    expected: Origin
    found: tuple[Origin, int] | None

    def __str__(self) -> str:
        origin = "bytes of no known origin" if self.found is None else f"byte {self.found[1]} of {self.found[0]}"
        return f"{self.expected}: {self.wrong_bytes} wrong bytes from byte {self.first_byte}, holding {origin}"


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a check: how many pages and bytes were wrong, and the first of them traced."""

    pages: int
    wrong_bytes: int
    traced: list[Wrong]

    def report(self, what: str) -> int:
        """Names the first wrong pages on stderr; gives how many bytes are wrong."""
        for wrong in self.traced:
            print(f"wrong: {what}: {wrong}", file=sys.stderr)
        if self.pages > len(self.traced):
            print(f"wrong: {what}: {self.pages} pages in all", file=sys.stderr)
        return self.wrong_bytes


class Native(Protocol):
    """The native twin: the same bytes, several threads."""

    def pattern_fill(self, address: int, offsets: U64, page_bytes: int, keys: U64, threads: int) -> None:
        """Writes one page per (offset, key)."""

    def pattern_verify(self, address: int, offsets: U64, page_bytes: int, keys: U64, threads: int) -> list[int]:
        """Returns the positions of the pages that differ."""


def keys(seed: int, stamp: int, layers: U64, blocks: U64) -> U64:
    """Makes the key of each (layer, block): the packed fields, mixed so that every bit of it matters."""
    head = np.uint64((seed & 0xFF) << 56 | (stamp & 0xFFF) << 44)
    packed: U64 = head | ((layers & np.uint64(0xFFF)) << np.uint64(32)) | (blocks & np.uint64(0xFFFFFFFF))
    return _mix(packed)


def origin(key: int) -> Origin:
    """Undoes `keys` for one key."""
    packed = int(_unmix(np.array([key], dtype=np.uint64))[0])
    return Origin(packed >> 56, packed >> 44 & 0xFFF, packed >> 32 & 0xFFF, packed & 0xFFFFFFFF)


def page(key: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """Makes the bytes of one page."""
    words = np.uint64(key) ^ _offsets_words(-(-page_bytes // 8))
    return words.astype("<u8").view(np.uint8)[:page_bytes]


def fill(
    memory: npt.NDArray[np.uint8], offsets: U64, page_bytes: int, page_keys: U64, native: Native | None, threads: int
) -> None:
    """Writes the pattern of each key to the page at each byte offset of `memory`.

    Raises:
        ValueError: A page does not lie in `memory`.
    """
    _check(memory, offsets, page_bytes)
    if native is not None:
        native.pattern_fill(memory.ctypes.data, offsets, page_bytes, page_keys, threads)
        return
    for first, last, want in _expected(page_bytes, page_keys):
        for at, bytes_of_page in zip(offsets[first:last].tolist(), want, strict=True):
            memory[at : at + page_bytes] = bytes_of_page


def find_wrong(
    memory: npt.NDArray[np.uint8], offsets: U64, page_bytes: int, page_keys: U64, native: Native | None, threads: int
) -> Found:
    """Compares every byte of every page with its pattern.

    Returns:
        How much differs; the first pages that do are traced to what their bytes were made for.

    Raises:
        ValueError: A page does not lie in `memory`.
    """
    _check(memory, offsets, page_bytes)
    if native is not None:
        bad = native.pattern_verify(memory.ctypes.data, offsets, page_bytes, page_keys, threads)
    else:
        bad = []
        for first, last, want in _expected(page_bytes, page_keys):
            for i, at in enumerate(offsets[first:last].tolist()):
                if not np.array_equal(memory[at : at + page_bytes], want[i]):
                    bad.append(first + i)
    pages = [(i, memory[int(offsets[i]) : int(offsets[i]) + page_bytes], int(page_keys[i])) for i in bad]
    wrong_bytes = sum(int(np.count_nonzero(got != page(key, page_bytes))) for _, got, key in pages)
    return Found(len(bad), wrong_bytes, [_trace(*wrong) for wrong in pages[:_TRACED]])


def _check(memory: npt.NDArray[np.uint8], offsets: U64, page_bytes: int) -> None:
    if len(offsets) and int(offsets.max()) + page_bytes > memory.nbytes:
        raise ValueError(f"page at `{int(offsets.max())}` of `{page_bytes}` bytes ends after `{memory.nbytes}`")


def _expected(page_bytes: int, page_keys: U64) -> Iterator[tuple[int, int, npt.NDArray[np.uint8]]]:
    """Makes the wanted pages, a few MiB at a time: (first position, end, one row per page)."""
    words = _offsets_words(-(-page_bytes // 8))
    step = max(1, _CHUNK_BYTES // page_bytes)
    for first in range(0, len(page_keys), step):
        chunk = page_keys[first : first + step]
        made = (chunk[:, None] ^ words[None, :]).astype("<u8", copy=False).view(np.uint8)
        yield first, first + len(chunk), made[:, :page_bytes]


def _offsets_words(count: int) -> U64:
    return np.arange(count, dtype=np.uint64) * GOLDEN


def _trace(position: int, got: npt.NDArray[np.uint8], key: int) -> Wrong:
    want = page(key, len(got))
    differs = np.flatnonzero(got != want)
    first = int(differs[0]) if len(differs) else 0
    return Wrong(position, first, len(differs), origin(key), _origin_of(got, first // 8, origin(key)))


def _origin_of(got: npt.NDArray[np.uint8], word: int, expected: Origin) -> tuple[Origin, int] | None:
    """Finds an offset for which two neighbouring words undo to one page of the same run."""
    whole = got[: len(got) // 8 * 8].view("<u8")
    at = min(word, len(whole) - 2)
    if at < 0:
        return None
    places = _offsets_words(len(whole))
    first = whole[at] ^ places[:-1]
    second = whole[at + 1] ^ places[1:]
    for i in np.flatnonzero(first == second).tolist():
        found = origin(int(first[i]))
        if found.seed == expected.seed:
            return found, (i + word - at) * 8
    return None


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * _MUL1
    x = (x ^ (x >> np.uint64(27))) * _MUL2
    return x ^ (x >> np.uint64(31))


def _unmix(x: U64) -> U64:
    x = _unshift(x, 31) * _INV2
    x = _unshift(x, 27) * _INV1
    return _unshift(x, 30)


def _unshift(x: U64, by: int) -> U64:
    """Undoes `x ^ (x >> by)`."""
    undone = x
    for _ in range(64 // by):
        undone = x ^ (undone >> np.uint64(by))
    return undone
