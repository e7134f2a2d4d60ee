"""Runs the steps, each in a process of its own, within a budget for all of them; knows nothing of what they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_check.outcome import FAILED, SKIPPED, Outcome, StepFailedError, StepSkippedError
from gpu_check.steps import PLANNED, STEPS, Step

MARK = "gpu-check outcome "
_LEAST_S = 5.0  # less than this is not worth starting a step for
_DYING_S = 10.0  # a process that is killed in a call of the driver can take a while, or for ever
_TAIL = 12
_left: list[subprocess.Popen[str]] = []  # processes that could not be ended


def answer(step: Step, budget_s: float) -> Outcome:
    """Is the child: runs a step here, and makes an outcome of whatever comes of it."""
    try:
        return step.load()(budget_s)
    except StepSkippedError as skipped:
        return Outcome(SKIPPED, str(skipped), absent=skipped.absent)
    except StepFailedError as failed:
        return Outcome(FAILED, str(failed))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this step's outcome
        hint = getattr(error, "hint", None)
        trace = traceback.format_exc().splitlines()[-_TAIL:]
        text = f"{type(error).__name__}: {error}" + (f" (hint: {hint})" if hint else "")
        return Outcome(FAILED, text, {"printed": trace})


def start(step: Step, timeout_s: float, environment: Mapping[str, str]) -> Outcome:
    """Is the parent: starts a step, kills it and whatever it started at its deadline, and reads what it says."""
    command = [sys.executable, "-m", "gpu_check", "--step", step.name, "--step-budget", f"{timeout_s * PLANNED:.1f}"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment, **step.environment},
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Outcome(FAILED, f"took longer than {timeout_s:.0f} s", {"printed": _tail(_killed(process))})
    # What a step has started and not ended would work on the GPU beside the next one.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    outcome = said(printed.splitlines())
    if outcome is None:
        return Outcome(FAILED, f"ended with {process.returncode} and said nothing", {"printed": _tail(printed)})
    if outcome.state == FAILED:
        outcome.facts.setdefault("printed", _tail("".join(_unmarked(printed))))
    return outcome


def said(lines: Sequence[str]) -> Outcome | None:
    """Reads the outcome among what a step printed; `None` where it said nothing."""
    for line in reversed(lines):
        if line.startswith(MARK):
            return Outcome(**json.loads(line.removeprefix(MARK)))
    return None


def _killed(process: subprocess.Popen[str]) -> str:
    """Ends a step and whatever it started; gives what it printed, unless the driver keeps one of them from dying."""
    os.killpg(process.pid, signal.SIGKILL)
    try:
        printed, _ = process.communicate(timeout=_DYING_S)
    except subprocess.TimeoutExpired:
        _left.append(process)
        return "what it started does not die: the driver holds it"
    return printed


def _unmarked(printed: str) -> list[str]:
    return [line for line in printed.splitlines(keepends=True) if not line.startswith(MARK)]


def _tail(printed: str | None) -> list[str]:
    return [line for line in (printed or "").splitlines() if line.strip()][-_TAIL:]


def run(
    only: Sequence[str],
    budget_s: float,
    environment: Mapping[str, str],
    tell: Callable[[Mapping[str, Mapping[str, Any]], str, Outcome, float], None],
    steps: Sequence[Step] = STEPS,
    *,
    patience: float = 1.0,
    late: str = FAILED,
) -> dict[str, dict[str, Any]]:
    """Runs the steps in order; what the budget leaves no time for proves nothing, and says so.

    Args:
        only: The names of the steps to run; all of them when empty.
        budget_s: Seconds for all steps together.
        environment: What all of them are told.
        tell: Called after each step, with what all said so far, and its name, outcome and seconds.
        steps: The steps there are.
        patience: How many times its deadline a step may take, and all together their budget.
        late: The state of a step that the budget leaves no time for.

    Returns:
        What each step said, with the seconds it took.
    """
    found: dict[str, dict[str, Any]] = {}
    budget_s *= patience
    began = time.monotonic()
    for step in steps:
        if step.hidden or (only and step.name not in only):
            continue
        left_s = budget_s - (time.monotonic() - began)
        started = time.monotonic()
        if left_s < _LEAST_S:
            outcome = Outcome(late, f"the {budget_s:.0f} s for all steps are over")
        else:
            outcome = start(step, min(step.timeout_s * patience, left_s), environment)
        seconds = time.monotonic() - started
        found[step.name] = {**outcome.to_json(), "seconds": round(seconds, 1)}
        tell(found, step.name, outcome, seconds)
    return found


def write(report: Mapping[str, Any], path: Path) -> None:
    """Writes the report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
