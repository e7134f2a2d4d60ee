"""Step: a few random jobs under compute-sanitizer, which sees reads and writes outside of what was allocated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_check import run as runner
from gpu_check.arena import is_dry
from gpu_check.outcome import FAILED, PASSED, Outcome, StepFailedError, StepSkippedError

_CODE = 97
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda-13/bin", "/opt/cuda/bin")
# Calls that fail are no errors here: torch and pdkv ask the driver for functions and addresses that it may not know.
# And the tool waits for a Python that takes its time to import torch.
_OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--launch-timeout", "0", "--error-exitcode", str(_CODE))


def find() -> str | None:
    """Looks for the tool: on the path, where CUDA is installed, in wheels."""
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *_PLACES]))
    if found:
        return found
    for folder in map(Path, sys.path):
        for name in ("nvidia/*/bin/compute-sanitizer", "nvidia/*/compute-sanitizer/compute-sanitizer"):
            for path in folder.glob(name) if folder.is_dir() else ():
                return str(path)
    return None


def run(budget_s: float) -> Outcome:
    """Runs them.

    Raises:
        StepSkippedError: There is no such tool, or it got nowhere in time.
        StepFailedError: It found something, or the jobs went wrong under it.
    """
    if is_dry():
        raise StepSkippedError("the stand-in's memory is the host's, which the Rust tests run under sanitizers")
    tool = find()
    if tool is None:
        raise StepSkippedError("no compute-sanitizer on PATH, in /usr/local/cuda/bin or among the wheels")
    return under(tool, budget_s)


def under(tool: str, budget_s: float) -> Outcome:
    """Runs the jobs under a tool.

    Raises:
        StepSkippedError: It got nowhere in time.
        StepFailedError: It found something, or the jobs went wrong under it.
    """
    command = [tool, *_OPTIONS, sys.executable, "-m", "gpu_check", "--step", "kernels-small", "--step-budget"]
    # Each tensor an allocation of its own: within a segment of torch's allocator the tool sees no border.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            [*command, f"{budget_s / 2:.1f}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=budget_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StepSkippedError(f"under `{tool}` a few jobs took longer than {budget_s:.0f} s") from error
    lines = done.stdout.splitlines()
    said = runner.said(lines)
    if done.returncode or said is None:
        last = _last(lines)
        raise StepFailedError(f"compute-sanitizer ended with {done.returncode}: {last}")
    if said.state == FAILED:
        raise StepFailedError(f"under compute-sanitizer the jobs went wrong: {said.text}")
    if said.state != PASSED:
        raise StepSkippedError(said.text)
    summary = next((line.strip("= ") for line in reversed(lines) if "SUMMARY" in line), "no summary")
    return Outcome(text=f"memcheck: {summary}; {said.text}", facts={"tool": tool, "jobs": said.facts})


def _last(lines: Sequence[str]) -> str:
    """What the tool said first and last: the first of its findings, which tells most, is at the front."""
    own = [line for line in lines if line.strip() and not line.startswith(runner.MARK)]
    found = [line for line in own if line.startswith("=========") and line.strip("= ")]
    return " / ".join([*found[:8], *own[-6:]])
