"""Blocks of one cache selected straight into those of another, beside a plain pull of the same blocks."""

from __future__ import annotations

import time
from typing import Any

from pdkv.bench import host
from pdkv.bench.cases import Case
from pdkv.bench.control import Message
from pdkv.bench.limits import limit_for
from pdkv.bench.lines import Common, Line, Measured, make_lines
from pdkv.bench.lookup.ends import NAME, tokens_of
from pdkv.bench.measure import Bench
from pdkv.bench.mover import Mover
from pdkv.bench.rivals import Entry
from pdkv.bench.side import Side
from pdkv.bench.sizes import format_size
from pdkv.bench.turns import take_turns
from pdkv.errors import ConfigError, PdkvError


class Select(Mover):
    """`drop_select_into`: the match, the pull, and the word that it was taken."""

    kind = "pdkv"
    name = "drop_select_into"
    path = ""

    def __init__(self, bench: Bench, side: Side) -> None:
        """Opens the producer's buffer and connects to it."""
        self._producer, self._side, self._timeout_s = bench.producer, side, bench.timeout_s
        self._tokens = tokens_of(side)
        self._producer.ask("blocks_open")
        self._buffer = bench.kit.pdkv.LookupBuffer(side.engine, side.peer, name=NAME, timeout_s=bench.timeout_s)

    def fill(self, stamp: int) -> None:
        """Lets the producer fill its blocks and insert them."""
        self._producer.ask("fill", stamp=stamp)
        self._producer.ask("blocks_insert")

    def run(self) -> float:
        """Selects them.

        Raises:
            PdkvError: It failed, or something else was found.
        """
        side, required = self._side, self._side.case.required
        started = time.perf_counter()
        found = self._buffer.drop_select_into(
            self._tokens, side.cache, side.ids, self._timeout_s, require=required, pull_timeout_s=self._timeout_s
        )
        seconds = time.perf_counter() - started
        if (found.num_tokens, found.num_blocks) != (len(self._tokens), len(side.ids)):
            raise PdkvError(f"`{found.num_tokens}` tokens matched of `{len(self._tokens)}` that were inserted")
        self.path, self.note = str(found.transfer.path), str(found.transfer.path.detail)
        return seconds

    def count_wrong(self, stamp: int) -> int:
        """Checks the blocks."""
        return self._side.find_wrong(stamp).report(f"drop_select_into stamp {stamp}")

    def close(self) -> None:
        """Closes both ends of the buffer."""
        self._buffer.close()
        self._producer.ask("blocks_close")


class Pull(Mover):
    """A plain pull of the same blocks by a reference that came beforehand."""

    kind = "pdkv"
    name = "pull"

    def __init__(self, bench: Bench, side: Side, opened: Message) -> None:
        """Moves by the case's own way."""
        self._bench, self._side, self._opened = bench, side, opened

    def fill(self, stamp: int) -> None:
        """Lets the producer fill its blocks."""
        self._bench.producer.ask("fill", stamp=stamp)

    def run(self) -> float:
        """Pulls them."""
        return self._bench.move_once(self._side, self._opened).seconds

    def count_wrong(self, stamp: int) -> int:
        """Checks the blocks."""
        return self._side.find_wrong(stamp).report(f"pull stamp {stamp}")


def lines(bench: Bench, case: Case) -> list[Line]:
    """Measures a case of op `pull` both ways, beside its limit.

    Raises:
        PdkvError: A transfer failed.
    """
    if case.op != "pull" or case.requests != 1:
        raise ConfigError("blocks are selected by pulls of one request", hint="leave out `--op` and `--burst`")
    gate = host.QuietGate(bench.quiet_wait_s, budget_s=bench.quiet_wait_s * 30)
    with bench.opened(case) as (side, opened):
        select = Select(bench, side)
        entries: list[Any] = [Entry("pdkv", one.name, rival=one) for one in (select, Pull(bench, side, opened))]
        try:
            entries[0].turn(1, counts=False)
            if bench.limits and (limit := limit_for(select.path, bench.kit.native, side, bench.producer, opened)):
                entries.append(Entry(limit.kind, limit.name, rival=limit))
            take_turns(bench, entries, gate)
        finally:
            for entry in reversed(entries):
                entry.close()
        wrong = side.find_touched().report("pages outside the table")
    common = Common(
        path=select.path,
        what=f"{len(side.ids):,} blocks, {case.pages:,} x {format_size(case.page_bytes)}",
        items=1,
        total_bytes=case.total_bytes,
        threads=case.threads,
        streams=case.streams,
        seed=case.seed,
        versions=host.versions(),
        loads=gate.loads,
    )
    measured = [Measured(one.kind, one.name, one.seconds, one.wrong, note=one.note) for one in entries]
    measured[0] = Measured("pdkv", select.name, entries[0].seconds, entries[0].wrong + wrong, note=entries[0].note)
    return make_lines(common, measured)
