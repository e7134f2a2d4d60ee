"""How long a test waits where a slow machine must not be late: a short time, and a longer one if the machine was.

A test that stops a peer waits until it counts as lost, and nobody else may; one in which a lease ends needs another to
be renewed in time. Who runs is in time by far, unless its machine keeps it from running. How long that may take nobody
knows beforehand, so it is measured, and the test done again.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

__all__ = ["follows_the_machine"]

PATIENCES_S = (3.0, 12.0, 48.0)


def follows_the_machine(test: Callable[..., None]) -> Callable[..., None]:
    """Calls a test with `patience_s`, for silences and leases. It may run again, so it makes its own engines.

    It fails if it fails with the longest, or although every thread got a processor well within that time.
    """

    @functools.wraps(test)
    def follow(**fixtures: Any) -> None:
        for patience_s in PATIENCES_S:
            before, stolen = _waits(), _stolen_s()
            try:
                test(**fixtures, patience_s=patience_s)
                return
            except (Exception, pytest.fail.Exception) as error:
                # The latter where an error was expected and none came. A test's time ends by it too, which is the end.
                if isinstance(error, pytest.fail.Exception) and "DID NOT RAISE" not in str(error):
                    raise
                waits = [waited - before.get(thread, 0.0) for thread, waited in _waits().items()]
                longest = max(waits, default=0.0) + _stolen_s() - stolen
                if patience_s == PATIENCES_S[-1] or longest < patience_s / 3:
                    raise
                print(f"a thread waited {longest:.1f} s for a processor, so {patience_s} s were too short")  # noqa: T201

    asked = inspect.signature(test)
    wanted = [each for name, each in asked.parameters.items() if name != "patience_s"]
    follow.__signature__ = asked.replace(parameters=wanted)  # type: ignore[attr-defined] - which fixtures pytest gives
    return pytest.mark.timeout(900)(follow)  # for all rounds together


def _stolen_s() -> float:
    """How long each processor, on average, was taken from this machine by its host, which no thread counts."""
    ticks = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def _waits() -> dict[int, float]:
    """For each thread of this process and of those it started, how long it has waited for a processor so far."""
    parents, found = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    for process in parents:
        ancestor = process
        while ancestor and ancestor != os.getpid():
            ancestor = parents.get(ancestor, 0)
        if ancestor:
            for thread in Path(f"/proc/{process}/task").glob("*"):
                with suppress(OSError):
                    found[int(thread.name)] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found
