"""What a step says of itself, as plain values for its parent."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass
class Outcome:
    """What came of a step.

    Attributes:
        state: `passed`, `failed` or `skipped`.
        text: What was found, or why it failed or was skipped, in a line.
        facts: Figures and names for the report.
        rows: Rows of the table of speeds.
        absent: What is not on this machine, so that something was left out.
    """

    state: str = PASSED
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Gives plain values."""
        return asdict(self)


class StepFailedError(Exception):
    """A check found something wrong; the text says what."""


class StepSkippedError(Exception):
    """A step has nothing to run on here; the text says why.

    Attributes:
        absent: What the machine lacks; nothing where it is the kind of run that leaves the step out.
    """

    def __init__(self, text: str, *absent: str) -> None:
        """Says so."""
        super().__init__(text)
        self.absent = list(absent)
