"""The limit rows of the `ucx` transport: the plain loop of `ucp_put_nbx` or `ucp_get_nbx` in the same run.

The loop is pdkv-ucx's and native; here are its two ends, one in each process of the bench, over the same
transports, copy of UCX, spans and window. `OneBlock` moves one and the same block as often as the case has
pages, as `ucx_perftest` does: what lies between it and the loop over all pages is the machine's caches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pdkv import wheels
from pdkv.bench import pattern
from pdkv.bench.control import Channel, Message
from pdkv.bench.limits import Rival
from pdkv.bench.pattern import U64
from pdkv.bench.side import Side
from pdkv.errors import ConfigError


class LoopEnd:
    """One process's end: a worker of its own beside the engine's, over the same pages."""

    def __init__(self, native: Any, side: Side) -> None:
        """Opens UCX and maps the pages.

        Raises:
            UnsupportedError: There is no UCX.
        """
        case = side.case
        self._side = side
        self._loop = native.UcxLoop(
            side.pages.bytes,
            library=case.ucx.library or None,
            wheels=wheels.folders(),
            settings=list(case.ucx.settings.items()),
        )
        self.version = str(self._loop.version)
        self._offsets = {
            end: np.concatenate([side.pages.offsets(ids) for ids in case.tables(end)]) for end in ("src", "dst")
        }

    def describe(self) -> Message:
        """Gives what the other end connects to."""
        address, key, base, length = self._loop.describe()
        return {"worker": address.hex(), "key": key.hex(), "base": base, "length": length, "version": self.version}

    def connect(self, other: Message) -> None:
        """Connects to what the other end's `describe` gave.

        Raises:
            ConfigError: It is not that.
        """
        try:
            worker, key = bytes.fromhex(str(other["worker"])), bytes.fromhex(str(other["key"]))
            base, length = int(str(other["base"])), int(str(other["length"]))
        except (KeyError, ValueError) as error:
            raise ConfigError("the other end of the loop describes itself in an unknown way") from error
        self._loop.connect(worker, key, base, length)

    def run(self, *, one_block: bool) -> float:
        """Runs the loop, by put from the source's end and by get from the target's; gives the seconds it took."""
        case, mine = self._side.case, self._side.end
        other = "dst" if mine == "src" else "src"
        local, remote = (_first(self._offsets[end]) if one_block else self._offsets[end] for end in (mine, other))
        verb = "put" if mine == "src" else "get"
        seconds: float = self._loop.run(verb, local, remote, case.page_bytes, case.ucx.window)
        return seconds

    def close(self) -> None:
        """Ends its thread and gives the worker back."""
        self._loop.close()


def _first(offsets: U64) -> U64:
    """Gives the first offset as often as there are any."""
    return np.full_like(offsets, offsets[0])


class Loop(Rival):
    """The loop over the case's pages, run by the end that starts the case's transfers."""

    def __init__(self, native: Any, side: Side, producer: Channel) -> None:
        """Opens and connects both ends.

        Raises:
            PdkvError: One end has no UCX, or they cannot reach each other.
        """
        super().__init__(side, producer)
        self.native = native
        self.name = loop_name(side.case.active)
        self._end = LoopEnd(native, side)
        try:
            self._end.connect(producer.ask("loop_open"))
            producer.ask("loop_connect", **self._end.describe())
        except BaseException:
            self._end.close()
            raise
        self.note = f"UCX {self._end.version}, {side.case.ucx.window} under way"

    def run(self, *, one_block: bool = False) -> float:
        """Runs the loop here or there."""
        if self.side.case.active == "consumer":
            return self._end.run(one_block=one_block)
        return float(str(self.producer.ask("loop_run", one_block=one_block)["seconds"]))

    def close(self) -> None:
        """Closes both ends."""
        self._end.close()
        self.producer.ask("loop_close")


class OneBlock(Rival):
    """The same loop with one block, again and again."""

    def __init__(self, loop: Loop) -> None:
        """Borrows the ends of a loop, which outlives it."""
        super().__init__(loop.side, loop.producer)
        self._loop = loop
        self.name, self.note = f"{loop.name}, one block", loop.note

    def run(self) -> float:
        """Runs it."""
        return self._loop.run(one_block=True)

    def count_wrong(self, stamp: int) -> int:
        """Checks the one block."""
        pages, case = self.side.pages, self.side.case
        at, key = pages.offsets(self.side.tables[0])[:1], pages.keys(case.tables("src")[0], stamp)[:1]
        found = pattern.find_wrong(pages.bytes, at, case.page_bytes, key, self._loop.native, 1)
        return found.report(f"{self.name} stamp {stamp}")


def loop_name(active: str) -> str:
    """Names the loop that the active end runs."""
    return "ucp_get_nbx loop" if active == "consumer" else "ucp_put_nbx loop"
