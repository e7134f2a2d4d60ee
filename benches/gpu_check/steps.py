"""The steps, in the order of what they prove; each with the longest that it may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NamedTuple

from gpu_check.outcome import Outcome
from gpu_check.transfers_env import EXPANDABLE

# A step plans to be done in this share of its deadline; the rest is for its start, and for a slow machine.
PLANNED = 0.6


class Step(NamedTuple):
    """One step.

    Attributes:
        name: What it is called.
        module: The module of this package that has it.
        function: The function there.
        timeout_s: The longest that it may take; then its process is killed.
        environment: What its process is told beside what it inherits.
        hidden: Whether only another step starts it.
    """

    name: str
    module: str
    function: str = "run"
    timeout_s: float = 60.0
    environment: Mapping[str, str] = {}
    hidden: bool = False

    def load(self) -> Callable[..., Outcome]:
        """Imports its function."""
        function: Callable[..., Outcome] = getattr(import_module(f"gpu_check.{self.module}"), self.function)
        return function


# What must be shown comes first, up to `nixl`: every kernel, the table, two processes, what posting costs, memcheck.
# Should each of these take all that it plans with, they still fit into the budget of a run. The first one waits for a
# disk that has not been read from, and for kernels to be compiled.
STEPS = (
    Step("machine", "machine", timeout_s=150),
    Step("kernels", "kernels", timeout_s=75),
    Step("speed", "speed", timeout_s=120),
    Step("two processes", "transfers", "two_processes", timeout_s=75),
    Step("plans", "plans", timeout_s=45),
    Step("posting", "posting", timeout_s=45),
    Step("sanitizer", "sanitizer", timeout_s=150),
    Step("nixl", "nixl", timeout_s=60),
    Step("staged", "transfers", "staged", timeout_s=45),
    Step("ucx", "transfers", "ucx", timeout_s=45),
    Step("expandable segments", "transfers", "expandable", timeout_s=45, environment=EXPANDABLE),
    Step("one process", "transfers", "one_process", timeout_s=45),
    Step("streams", "streams", timeout_s=45),
    Step("host", "host", timeout_s=60),
    Step("racecheck", "sanitizer", "races", timeout_s=100),
    Step("protocols", "protocols", timeout_s=60),
    Step("capture", "capture", timeout_s=45),
    Step("kernels-small", "kernels", "run_small", hidden=True),
    Step("kernels-races", "kernels", "run_races", hidden=True),
)
