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


# What proves and measures most comes first: the budget may end before the steps do. The first one waits for a disk that
# has not been read from, and for kernels to be compiled.
STEPS = (
    Step("machine", "machine", timeout_s=150),
    Step("kernels", "kernels", timeout_s=75),
    Step("speed", "speed", timeout_s=120),
    Step("plans", "plans"),
    Step("one process", "transfers", "one_process"),
    Step("two processes", "transfers", "two_processes", timeout_s=75),
    Step("posting", "posting", timeout_s=60),
    Step("streams", "streams"),
    Step("host", "host", timeout_s=75),
    Step("expandable segments", "transfers", "expandable", environment=EXPANDABLE),
    Step("protocols", "protocols", timeout_s=90),
    Step("capture", "capture"),
    Step("staged", "transfers", "staged"),
    Step("sanitizer", "sanitizer", timeout_s=180),
    Step("nixl", "nixl", timeout_s=60),
    Step("kernels-small", "kernels", "run_small", timeout_s=75, hidden=True),
)
