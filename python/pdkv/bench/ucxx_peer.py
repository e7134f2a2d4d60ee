"""`--compare ucxx`: the same pages by the Python bindings of UCX, in two processes of their own, as a row.

Starts and drives the processes of `ucxx_end`; imports nothing of the bindings itself.
"""

from __future__ import annotations

import importlib.util
import os
import time
from contextlib import ExitStack

from pdkv.bench import control
from pdkv.bench.control import Channel
from pdkv.bench.limits import Rival
from pdkv.bench.side import Side
from pdkv.errors import UnsupportedError


def check() -> None:
    """Refuses, before anything is measured, what could not be.

    Raises:
        UnsupportedError: The bindings are not installed.
    """
    if importlib.util.find_spec("ucxx") is None:
        raise UnsupportedError(
            "`--compare ucxx` needs the Python bindings of that name", hint="pip install 'pdkv[bench-peers]'"
        )


class Ucxx(Rival):
    """Both ends on this machine, with pools, tables and bytes of the case."""

    kind = "peer"
    name = "ucxx tag"

    def __init__(self, side: Side, producer: Channel, timeout_s: float) -> None:
        """Starts the two processes and connects them.

        Raises:
            PdkvError: One did not start, or the bindings refuse.
        """
        check()
        super().__init__(side, producer)
        case = side.case
        environment = {**os.environ, "UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_FILE": "stderr"}
        environment |= {f"UCX_{key}": value for key, value in case.ucx.settings.items()}
        with ExitStack() as stack:
            self._ends = [
                stack.enter_context(
                    control.spawned(
                        ["-m", "pdkv.bench.ucxx_end"], timeout_s, f"the ucxx process of `{role}`", environment
                    )
                )
                for role in ("src", "dst")
            ]
            source, target = self._ends
            told = source.ask("open", case=case.to_json(), role="src")
            other = target.ask("open", case=case.to_json(), role="dst")
            source.ask("connect", address=other["address"])
            target.ask("connect", address=told["address"])
            self._stack = stack.pop_all()
        asked = f"ucxx {told['version']}, UCX_TLS={case.ucx.tls or 'all'}"
        self.note = f"{asked}; it binds neither put nor get: a tagged message a page"

    def fill(self, stamp: int) -> None:
        """Lets the source fill its pages."""
        self._ends[0].ask("fill", stamp=stamp)

    def run(self) -> float:
        """Lets both ends post every page; the clock stops when both are done."""
        started = time.perf_counter()
        for end in self._ends:
            end.send({"do": "move"})
        for end in reversed(self._ends):
            end.answer()
        return time.perf_counter() - started

    def count_wrong(self, stamp: int) -> int:
        """Lets the target check its pages."""
        return int(str(self._ends[1].ask("check", stamp=stamp)["wrong"]))

    def close(self) -> None:
        """Ends the processes."""
        self._stack.close()
