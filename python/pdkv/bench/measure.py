"""Runs one case: warm-up, then pdkv, its limit and its peers in turn, every byte checked after each.

The order of the turns alternates, and all start from freshly written source bytes, so that noise and
caches favour none. The clock never includes connecting, filling or checking.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from pdkv.bench import control, host
from pdkv.bench.cases import Case
from pdkv.bench.control import Channel
from pdkv.bench.pattern import CANARY_STAMP
from pdkv.bench.rivals import Entry, entries
from pdkv.bench.rows import Row, make_rows
from pdkv.bench.side import Side, Timing, Toolkit
from pdkv.errors import ConfigError, PdkvError


@dataclass
class Bench:
    """The consumer's side of a run: how to measure, and the producer to measure with.

    Attributes:
        kit: The library.
        producer: The channel to the producer.
        iters: Measured iterations.
        warmup: Iterations before that.
        limits: Whether to measure limit rows.
        compare: Other programs to measure beside pdkv.
        insecure: Whether engines may listen beyond loopback.
        timeout_s: Deadline of every transfer.
        quiet_wait_s: How long to wait before an iteration for other processes to rest.
        tick: Called after every iteration, for a progress bar.
    """

    kit: Toolkit
    producer: Channel
    iters: int = 5
    warmup: int = 1
    limits: bool = True
    compare: tuple[str, ...] = ()
    insecure: bool = False
    timeout_s: float = 120.0
    quiet_wait_s: float = 0.0
    tick: Callable[[], None] = field(default=lambda: None)

    @contextmanager
    def opened(self, case: Case) -> Iterator[tuple[Side, control.Message]]:
        """Opens both sides of a case and connects them; gives ours and the producer's description of its own.

        Raises:
            PdkvError: A side could not be built, or there is too little memory.
        """
        copies = 2 + (self.limits and case.where == "pool") + 2 * len(self.compare)
        host.require_memory(case.pool_bytes * copies, "this case")
        opened = self.producer.ask("open", case=case.to_json())
        listen = control.join_address(self.producer.host, 0)
        try:
            side = Side(self.kit, case, "consumer", listen, insecure=self.insecure, timeout_s=self.timeout_s)
            with side:
                if case.active == "consumer":
                    side.connect(str(opened["address"]))
                else:
                    self.producer.ask("peer", address=str(side.describe()["address"]))
                yield side, opened
        except BaseException:
            with suppress(PdkvError):  # the first error is the one to show
                self.producer.ask("close")
            raise
        self.producer.ask("close")

    def run(self, case: Case) -> list[Row]:
        """Measures a case; gives its row and those of what was measured beside it.

        Raises:
            PdkvError: A transfer failed.
        """
        stamps = itertools.cycle(range(1, CANARY_STAMP))
        gate = host.QuietGate(self.quiet_wait_s, budget_s=self.quiet_wait_s * 30)
        with self.opened(case) as (side, opened):
            timings: list[Timing] = []
            wrong = 0
            for _ in range(self.warmup):
                wrong += self._pdkv(side, opened, next(stamps))[1]
            first, count = self._pdkv(side, opened, next(stamps))
            wrong += count
            others = entries(first.path, first.detail, self, side, opened)
            try:
                for other in others:
                    other.turn(next(stamps), counts=False)
                for iteration in range(self.iters):
                    turns: list[Entry | None] = [None, *others]
                    for turn in turns if iteration % 2 == 0 else reversed(turns):
                        gate()
                        if turn is not None:
                            turn.turn(next(stamps), counts=True)
                            continue
                        timing, count = self._pdkv(side, opened, next(stamps))
                        timings.append(timing)
                        wrong += count
                    self.tick()
            finally:
                for other in reversed(others):
                    other.close()
            wrong += side.find_touched().report("pages outside the table")
        return make_rows(case, timings, wrong, [other.beside() for other in others], host.versions(), gate.loads)

    def _pdkv(self, side: Side, opened: control.Message, stamp: int) -> tuple[Timing, int]:
        """Moves a case once by pdkv; gives the timing and how many bytes were wrong."""
        self.producer.ask("fill", stamp=stamp)
        timing = self.move_once(side, opened)
        return timing, side.find_wrong(stamp).report(f"{side.case.op} stamp {stamp}")

    def move_once(self, side: Side, opened: control.Message) -> Timing:
        """Publishes what the operation needs, moves it, and takes back what was published."""
        op = side.case.op
        if op == "pull":
            references = texts(self.producer.ask("publish")["references"])
            timing = side.move(references)
            self.producer.ask("release")
            return timing
        if op == "read":
            return side.move([str(opened["region"])])
        wanted = side.publish() if op == "push" else [str(side.describe()["region"])]
        timing = Timing.from_json(self.producer.ask("move", wanted=wanted)["timing"])
        side.release()
        return timing


def texts(value: object) -> list[str]:
    """Reads a list of texts from an answer.

    Raises:
        ConfigError: It is not a list.
    """
    if not isinstance(value, list):
        raise ConfigError("the producer's answer is not a list")
    return [str(text) for text in value]
