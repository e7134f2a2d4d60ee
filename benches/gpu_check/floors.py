"""What the speeds must be, as ratios within one run, and the judgement of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Floor:
    """One promise.

    Attributes:
        what: The promise in words.
        bound: The least that keeps it, or the most.
        found: What was measured; `None` where nothing was.
        most: Whether the bound is the most.
        judged: Whether the run counts: a dry run does not.
        due: Whether the run had to measure it, being one of all steps.
    """

    what: str
    bound: float
    found: float | None
    most: bool = False
    judged: bool = True
    due: bool = True

    @property
    def kept(self) -> bool | None:
        """Whether it is kept; `None` where the run is not judged by it. What was due and not measured is not kept."""
        if not self.judged:
            return None
        if self.found is None:
            return False if self.due else None
        return self.found <= self.bound if self.most else self.found >= self.bound

    def to_json(self) -> dict[str, Any]:
        """Gives plain values."""
        return {**asdict(self), "kept": self.kept}


def judge(steps: Mapping[str, Mapping[str, Any]], *, dry: bool, whole: bool) -> list[Floor]:
    """Judges what the steps found, in a dry run or not, of all steps or of some."""
    table = {row["block_bytes"]: row for row in _rows(steps, "speed")}
    growth = steps.get("posting", {}).get("facts", {}).get("growth")

    def of(size: int, what: str) -> float | None:
        found = table.get(size, {}).get(what)
        return None if found is None else float(found)

    counts = {"judged": not dry, "due": whole}
    paged = "paged copy of {} KiB blocks in 32 planes, as a transfer takes it, of the device copy"
    return [
        Floor(paged.format(16), 0.85, of(16 << 10, "fraction"), **counts),
        Floor(paged.format(4), 0.6, of(4 << 10, "fraction"), **counts),
        Floor("16 KiB blocks against a loop of cuMemcpyAsync, times", 20.0, of(16 << 10, "times_loop"), **counts),
        Floor("planning and posting for 128 layers, times that for one", 1.5, growth, most=True, **counts),
    ]


def _rows(steps: Mapping[str, Mapping[str, Any]], name: str) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = steps.get(name, {}).get("rows", [])
    return rows
