"""`--mode lookup`: `drop_select` of one prompt among many, here and from another process, beside a scan of them all.

Every buffer holds the same entries in the same order, is asked for the same one at a time, and gets it back behind the
others. What is asked for stands where a scan finds it last, halfway, or anywhere; to an index that is all the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pdkv.bench import control, host
from pdkv.bench.cases import Case
from pdkv.bench.lines import Common, Line, Measured, make_lines
from pdkv.bench.lookup import blocks
from pdkv.bench.lookup.ends import NAME, ROOM
from pdkv.bench.lookup.prompts import Prompts
from pdkv.bench.lookup.scan import Scan
from pdkv.bench.measure import Bench

POSITIONS = ("worst", "median", "random")
LOCAL, REMOTE, INDEX = "drop_select, here", "drop_select, two processes", "index alone, here"
# Lookups by pdkv for one by the scan, which takes so much longer.
_PER_SCAN = 20
# Numbers of a prompt that are in memory at once, in both processes: drawn, in the index, and what an entry adds.
_COPIES = 6


class Order:
    """Where a scan would find each entry: a circle in which what was passed over stands behind the others."""

    def __init__(self, entries: int, seed: int) -> None:
        """Starts with all of them in order."""
        self._circle = deque(range(entries))
        self._random = np.random.default_rng([seed, 2])

    def pick(self, position: str) -> int:
        """Gives the place to look at: never that of the entry which just came back, the easiest for everybody."""
        last = len(self._circle) - 2
        return {"worst": last, "median": last // 2, "random": int(self._random.integers(0, last + 1))}[position]

    def move(self, place: int) -> int:
        """Moves the entry at a place behind all others; gives its number."""
        self._circle.rotate(-place)
        number = self._circle.popleft()
        self._circle.append(number)
        return number


class Buffer(Protocol):
    """What is asked: each gives what it found, and takes it back when the clock stands still."""

    def select(self, tokens: Any, roi: Any) -> Sequence[Any] | None:
        """Takes the entry that matches."""

    def put_back(self, number: int) -> None:
        """Inserts the entry again."""


class Here:
    """A `LookupBuffer` of this process, or the scan: both are filled by `insert`."""

    def __init__(self, buffer: Any, prompts: Prompts, drawn: Sequence[Any], **options: Any) -> None:
        """Fills it; the options are those of its `drop_select`."""
        self._buffer, self._prompts, self._drawn, self._options = buffer, prompts, drawn, options
        for number in range(prompts.entries):
            self.put_back(number)

    def select(self, tokens: Any, roi: Any) -> Sequence[Any] | None:
        """Selects."""
        found: Sequence[Any] | None = self._buffer.drop_select(tokens, roi, **self._options)
        return found

    def put_back(self, number: int) -> None:
        """Inserts."""
        payload = self._prompts.payload(number)
        self._buffer.insert(self._drawn[number], self._prompts.mask(), payload, payload, None)


class Index:
    """The index alone, tokens given as it wants them."""

    def __init__(self, native: Any, drawn: Sequence[Any]) -> None:
        """Fills it."""
        self._index, self._drawn = native.LookupIndex(), drawn
        self._numbers = {self._index.insert(np.asarray(tokens)): i for i, tokens in enumerate(drawn)}

    def select(self, tokens: Any, _: Any) -> Sequence[Any] | None:
        """Finds and removes; gives what a buffer would, as far as that is known here."""
        found = self._index.find(np.asarray(tokens))
        if found is None:
            return None
        self._index.take(found[0])
        self._index.remove(found[0])
        number = self._numbers.pop(found[0])
        return [self._drawn[number], None, number]

    def put_back(self, number: int) -> None:
        """Inserts."""
        self._numbers[self._index.insert(np.asarray(self._drawn[number]))] = number


class There:
    """A consumer's `LookupBuffer`, whose producer is the other process."""

    def __init__(self, bench: Bench, prompts: Prompts) -> None:
        """Lets the producer fill its buffer and connects to it."""
        self._producer, self._timeout_s = bench.producer, bench.timeout_s
        opened = bench.producer.ask("lookup_open", prompts=prompts.to_json())
        self._engine = bench.kit.pdkv.Engine(
            "bench-seeker", listen=control.join_address(bench.producer.host, 0), insecure=bench.insecure
        )
        try:
            peer = self._engine.connect(str(opened["address"]), timeout_s=bench.timeout_s)
            self._buffer = bench.kit.pdkv.LookupBuffer(
                self._engine, peer, name=NAME, library=prompts.library, timeout_s=bench.timeout_s
            )
        except BaseException:
            self._engine.close()
            raise

    def select(self, tokens: Any, roi: Any) -> Sequence[Any] | None:
        """Selects."""
        found: Sequence[Any] = self._buffer.drop_select(tokens, roi, self._timeout_s)
        return found

    def put_back(self, number: int) -> None:
        """Lets the producer insert."""
        self._producer.ask("lookup_insert", number=number)

    def close(self) -> None:
        """Closes both ends."""
        self._buffer.close()
        self._engine.close()
        self._producer.ask("lookup_close")


@dataclass
class Asked:
    """One buffer and what was measured of it at one position."""

    kind: str
    name: str
    buffer: Buffer
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    path: str = "-"

    def ask(self, tokens: Any, roi: Any, number: int, *, counts: bool) -> None:
        """Selects an entry, checks that it is the one, and puts it back."""
        started = time.perf_counter()
        found = self.buffer.select(tokens, roi)
        spent = time.perf_counter() - started
        if found is None or not _is_entry(found, tokens, number):
            self.wrong += 1
        self.buffer.put_back(number)
        if counts:
            self.seconds.append(spent)


def _is_entry(found: Sequence[Any], tokens: Any, number: int) -> bool:
    return bool(np.array_equal(np.asarray(found[0]), np.asarray(tokens)) and np.all(np.asarray(found[2]) == number))


def run(bench: Bench, prompts: Prompts, cases: Sequence[Case], label: Callable[[str], None]) -> list[Line]:
    """Measures lookups at every position, and the selection of blocks in every case.

    Raises:
        PdkvError: A lookup or a transfer failed, or there is too little memory.
    """
    label(prompts.label("one"))
    lines = list(lookups(bench, prompts))
    for case in cases:
        label(f"drop_select_into {case.label()}")
        lines += blocks.lines(bench, case)
    return lines


def lookups(bench: Bench, prompts: Prompts) -> Iterator[Line]:
    """Measures lookups at every position.

    Raises:
        PdkvError: One failed, or there is too little memory.
    """
    host.require_memory(prompts.all_tokens * 8 * _COPIES, "so many prompts")
    drawn = prompts.draw()
    roi, order = prompts.mask(), Order(prompts.entries, prompts.seed)
    with ExitStack() as stack:
        local = bench.kit.pdkv.LookupBuffer(max_bytes=ROOM)
        stack.callback(local.close)
        here = Here(local, prompts, drawn, timeout_s=bench.timeout_s)
        index = Index(bench.kit.native, drawn)
        there = There(bench, prompts)
        stack.callback(there.close)
        scan = Scan(prompts.library)
        scanned = Here(scan, prompts, drawn)
        rows = {
            position: [
                Asked("pdkv", LOCAL, here),
                Asked("pdkv", INDEX, index),
                Asked("pdkv", REMOTE, there, path="stream"),
                Asked("peer", scan.name, scanned),
            ]
            for position in POSITIONS
        }
        for iteration in range(bench.warmup + bench.iters):
            for position in POSITIONS:
                for repeat in range(_PER_SCAN):
                    place = order.pick(position)
                    number = order.move(place)
                    tokens = _copied(drawn[number])
                    for asked in rows[position]:
                        if asked.kind == "peer" and repeat:
                            scan.take(place)
                            asked.buffer.put_back(number)
                        else:
                            asked.ask(tokens, roi, number, counts=iteration >= bench.warmup)
            bench.tick()
    for position, everyone in rows.items():
        common = Common("-", prompts.label(position), 1, 0, 0, 0, prompts.seed, host.versions())
        yield from make_lines(
            common, [Measured(one.kind, one.name, one.seconds, one.wrong, path=one.path) for one in everyone]
        )


def _copied(tokens: Any) -> Any:
    """What a request comes with is not the memory of the entry it wants."""
    return tokens.clone() if hasattr(tokens, "clone") else tokens.copy()
