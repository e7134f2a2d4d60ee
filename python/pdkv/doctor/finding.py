"""One thing that was looked at, and the two ways to show all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Examination", "Finding"]

_INDENT = " " * 6


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        subject: What it is.
        good: Whether it is as it should be.
        text: What was found.
        hint: What to do about it; every finding that is not good has one.
        needed: Whether pdkv cannot work at all unless it is good.
    """

    subject: str
    good: bool
    text: str
    hint: str | None = None
    needed: bool = False

    @property
    def status(self) -> str:
        """`"ok"`, `"note"` for what may be worth a change, `"bad"` for what must be changed."""
        if self.good:
            return "ok"
        return "bad" if self.needed else "note"


class Examination(NamedTuple):
    """Everything that was looked at, and the facts behind it for programs."""

    findings: Sequence[Finding]
    facts: dict[str, Any]

    @property
    def good(self) -> bool:
        """Whether everything that is needed is good."""
        return all(finding.status != "bad" for finding in self.findings)

    def as_text(self) -> str:
        """Shows each finding on a line, and its hint below."""
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.status:<4}  {finding.subject}: {finding.text}")
            if finding.hint:
                lines.append(f"{_INDENT}hint: {finding.hint}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Gives what `pdkv doctor --format json` prints; docs/reference/cli.md describes it."""
        rows = [
            {
                "subject": finding.subject,
                "status": finding.status,
                "text": finding.text,
                "hint": finding.hint,
                "needed": finding.needed,
            }
            for finding in self.findings
        ]
        return {"good": self.good, "findings": rows, **self.facts}
