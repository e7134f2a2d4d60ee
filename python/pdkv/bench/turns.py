"""Who moves when: all in turn, in alternating order, so that noise and caches favour none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from pdkv.bench.measure import Bench
from pdkv.bench.pattern import CANARY_STAMP
from pdkv.bench.rivals import Entry

# What a peer's turns may take together before it gets no more.
_PATIENCE_S = 15.0


def take_turns(bench: Bench, entries: Sequence[Entry], gate: Callable[[], None]) -> None:
    """Lets each take its turn as often as there are iterations, in alternating order, after warming up.

    A peer that is so slow that its turns would take longer than all the others' gets fewer of them.
    """
    stamps = itertools.cycle(range(1, CANARY_STAMP))
    for _ in range(bench.warmup):
        for entry in entries:
            entry.turn(next(stamps), counts=False)
    for iteration in range(bench.iters):
        turns: Iterable[Entry] = entries if iteration % 2 == 0 else reversed(entries)
        for entry in turns:
            if entry.kind == "peer" and sum(entry.seconds) > _PATIENCE_S:
                continue
            gate()
            entry.turn(next(stamps), counts=True)
        bench.tick()
