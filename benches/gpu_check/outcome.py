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
    """

    state: str = PASSED
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Gives plain values."""
        return asdict(self)


class StepFailedError(Exception):
    """A check found something wrong; the text says what."""


class StepSkippedError(Exception):
    """A step has nothing to run on here; the text says what is missing."""
