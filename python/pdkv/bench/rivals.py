"""What is measured beside pdkv in a case: the limit of its path, and the peers that were asked for.

One that cannot take part, or fails, keeps its row and says there why; it never ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdkv.bench import control, perftest, ucx_loop, ucxx_peer
from pdkv.bench.control import Channel
from pdkv.bench.limits import Rival, limit_for
from pdkv.bench.mover import Mover
from pdkv.bench.rows import Beside
from pdkv.bench.side import Side, Toolkit
from pdkv.errors import PdkvError

_FEWEST_MESSAGES = 64
_MOST_BYTES = 1 << 30
_PERFTEST_S = 60.0


@dataclass
class Entry:
    """One that is measured in turn with others, and what was measured of it. Only a peer may fail."""

    kind: str
    name: str
    note: str = ""
    rival: Mover | None = None
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0

    def turn(self, stamp: int, *, counts: bool) -> None:
        """Fills, moves and checks once; with `counts` the time is kept."""
        if self.rival is None:
            return
        try:
            self.rival.fill(stamp)
            seconds = self.rival.run()
            if self.rival.checked:
                self.wrong += self.rival.count_wrong(stamp)
        except PdkvError as error:
            if self.kind != "peer":
                raise
            self._drop(error)
            return
        if counts:
            self.seconds.append(seconds)

    def close(self) -> None:
        """Gives back what it holds; idempotent."""
        rival, self.rival = self.rival, None
        if rival is None:
            return
        self.note = rival.note
        try:
            rival.close()
        except PdkvError as error:
            if self.kind != "peer":
                raise
            self.note += f"; {error}"

    def beside(self) -> Beside:
        """Gives what a row is made from."""
        return Beside(self.kind, self.name, self.seconds, self.wrong, self.note)

    def _drop(self, error: PdkvError) -> None:
        self.close()
        self.seconds.clear()
        self.note = str(error)


class Perftest(Rival):
    """`ucx_perftest` with messages of one page, as many as the case has pages or a gigabyte of them.

    It runs with the window that suits it better, the case's or none: release 1.13 loses a second and more by a
    window of large puts. (Its gets of one at a time take a millisecond each, so for those there is no choice.)
    """

    kind = "peer"
    checked = False

    def __init__(self, side: Side, producer: Channel, test: str, version: str) -> None:
        """Finds the program of a version of UCX.

        Raises:
            UnsupportedError: There is none.
        """
        super().__init__(side, producer)
        self._tool, self._test = perftest.find(version, side.case.ucx.path), test
        self._window: int | None = None
        self.name = f"ucx_perftest {test}"

    def fill(self, stamp: int) -> None:
        """Has nothing to fill: the program moves what its memory holds."""

    def run(self) -> float:
        """Runs it; gives the seconds that all pages of the case would have taken at its rate.

        Raises:
            PdkvError: It failed.
        """
        if self._window is None:
            windows = {self.side.case.ucx.window, 1} if self._test.endswith("_bw") else {self.side.case.ucx.window}
            rates = {window: self._rate(window) for window in sorted(windows)}
            self._window = max(rates, key=lambda window: rates[window])
            under_way = f"{self._window} under way"
            self.note = f"UCX {self._tool.version}, {under_way}, one block again and again, its bytes are not checked"
        return self.side.case.total_bytes / self._rate(self._window)

    def _rate(self, window: int) -> float:
        case = self.side.case
        messages = max(_FEWEST_MESSAGES, min(case.pages, _MOST_BYTES // case.page_bytes))
        given = case.ucx.settings
        return perftest.run(self._tool, self._test, case.page_bytes, messages, window, given, _PERFTEST_S).bytes_per_s


def perftest_name(op: str, detail: str) -> str:
    """Chooses the test that does what pdkv did: by op, and by what its path says it rides on."""
    if not detail.startswith("put/get"):
        return "ucp_am_bw"
    return "ucp_get" if op in ("pull", "read") else "ucp_put_bw"


class Wanted(Protocol):
    """What a run wants beside pdkv, and what to make it with."""

    kit: Toolkit
    producer: Channel
    limits: bool
    compare: tuple[str, ...]
    timeout_s: float


def entries(path: str, detail: str, wanted: Wanted, side: Side, opened: control.Message) -> list[Entry]:
    """Sets up what is measured beside a case on this path; the limit first."""
    found = []
    case, producer = side.case, wanted.producer
    if wanted.limits and (limit := limit_for(path, wanted.kit.native, side, wanted.producer, opened)) is not None:
        found.append(Entry(limit.kind, limit.name, rival=limit))
    if wanted.limits and path == "ucx":
        loop = made("limit", ucx_loop.loop_name(case.active), lambda: ucx_loop.Loop(wanted.kit.native, side, producer))
        found.append(loop)
        if isinstance(loop.rival, ucx_loop.Loop):
            one = ucx_loop.OneBlock(loop.rival)
            found.append(Entry(one.kind, one.name, rival=one))
        test, version = perftest_name(case.op, detail), detail.rpartition("UCX ")[2]
        found.append(made("peer", f"ucx_perftest {test}", lambda: Perftest(side, producer, test, version)))
    if "ucxx" in wanted.compare:
        found.append(made("peer", ucxx_peer.Ucxx.name, lambda: ucxx_peer.Ucxx(side, producer, wanted.timeout_s)))
    return found


def made(kind: str, name: str, make: Callable[[], Mover]) -> Entry:
    """Makes a rival; if that is not possible the entry says why."""
    try:
        return Entry(kind, name, rival=make())
    except PdkvError as error:
        return Entry(kind, name, note=str(error))
