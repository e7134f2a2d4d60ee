"""Questions whose asking could crash, hang or print: each is put in a process of its own, with a deadline.

This is the parent's side; the child's is `answer.py`. Its answers are lines of JSON behind a mark that tells them from
what a library may print.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any, NamedTuple

__all__ = ["MARK", "Outcome", "ask"]

MARK = "pdkv-doctor "
_TIMEOUT_S = 30.0


class Outcome(NamedTuple):
    """What came of a question.

    Attributes:
        answers: What the child said, in order.
        failure: How the child ended if not well: a phrase such as "was killed by SIGSEGV".
        printed: The end of what it printed on its standard error.
    """

    answers: list[dict[str, Any]]
    failure: str | None = None
    printed: str = ""

    @property
    def answer(self) -> dict[str, Any] | None:
        """The one answer to a question that has one, or `None` if the child said nothing."""
        return self.answers[-1] if self.answers else None


def ask(*question: str, timeout_s: float = _TIMEOUT_S) -> Outcome:
    """Puts a question to a child and takes what comes of it; never raises because of what the child does."""
    with subprocess.Popen(
        [sys.executable, "-m", "pdkv.doctor.answer", *question],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            printed, complaints = process.communicate(timeout=timeout_s)
            failure = _ending(process.returncode)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, complaints = process.communicate()
            failure = f"took longer than {timeout_s:g} s"
    return Outcome(_answers(printed), failure, " / ".join(line for line in complaints.splitlines()[-3:] if line))


def _ending(code: int) -> str | None:
    if code == 0:
        return None
    if code > 0:
        return f"ended with code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _answers(printed: str) -> list[dict[str, Any]]:
    marked = (line.removeprefix(MARK) for line in printed.splitlines() if line.startswith(MARK))
    return [json.loads(line) for line in marked]
