"""Runs one case: warm-up, then pdkv and its limit in turn, every byte checked after each.

The order of the two alternates, and both start from freshly written source bytes, so that noise and
caches favour neither. The clock never includes connecting, filling or checking.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from pdkv.bench import control, host
from pdkv.bench.cases import Case
from pdkv.bench.control import Channel
from pdkv.bench.limits import Limit, limit_for
from pdkv.bench.pattern import CANARY_STAMP, Found
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
        copies = 3 if self.limits and case.where == "pool" else 2
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
        """Measures a case; gives its row and the row of its limit.

        Raises:
            PdkvError: A transfer failed.
        """
        stamps = itertools.cycle(range(1, CANARY_STAMP))
        gate = host.QuietGate(self.quiet_wait_s, budget_s=self.quiet_wait_s * 30)
        with self.opened(case) as (side, opened):
            timings: list[Timing] = []
            wrong = limit_wrong = 0
            for _ in range(self.warmup):
                wrong += self._pdkv(side, opened, next(stamps))[1]
            first, count = self._pdkv(side, opened, next(stamps))
            wrong += count
            limit = limit_for(first.path, self.kit.native, side, self.producer, opened) if self.limits else None
            seconds: list[float] = []
            try:
                if limit is not None:
                    limit_wrong += _limit(limit, side, next(stamps))[1]
                for iteration in range(self.iters):
                    for turn in ("pdkv", "limit") if iteration % 2 == 0 else ("limit", "pdkv"):
                        gate()
                        if turn == "pdkv":
                            timing, count = self._pdkv(side, opened, next(stamps))
                            timings.append(timing)
                            wrong += count
                        elif limit is not None:
                            took, count = _limit(limit, side, next(stamps))
                            seconds.append(took)
                            limit_wrong += count
                    self.tick()
            finally:
                if limit is not None:
                    limit.close()
            wrong += _report(side.find_touched(), "pages outside the table")
        measured = None if limit is None else (limit.name, seconds, limit_wrong)
        return make_rows(case, timings, wrong, measured, host.versions(), gate.loads)

    def _pdkv(self, side: Side, opened: control.Message, stamp: int) -> tuple[Timing, int]:
        """Moves a case once by pdkv; gives the timing and how many bytes were wrong."""
        self.producer.ask("fill", stamp=stamp)
        timing = self.move_once(side, opened)
        return timing, _report(side.find_wrong(stamp), f"{side.case.op} stamp {stamp}")

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


def _limit(limit: Limit, side: Side, stamp: int) -> tuple[float, int]:
    limit.fill(stamp)
    seconds = limit.run()
    return seconds, _report(side.find_wrong(stamp), f"{limit.name} stamp {stamp}")


def texts(value: object) -> list[str]:
    """Reads a list of texts from an answer.

    Raises:
        ConfigError: It is not a list.
    """
    if not isinstance(value, list):
        raise ConfigError("the producer's answer is not a list")
    return [str(text) for text in value]


def _report(found: Found, what: str) -> int:
    """Names the first wrong pages on stderr; gives how many bytes are wrong."""
    for wrong in found.traced:
        print(f"wrong: {what}: {wrong}", file=sys.stderr)
    if found.pages > len(found.traced):
        print(f"wrong: {what}: {found.pages} pages in all", file=sys.stderr)
    return found.wrong_bytes
