"""Steps: a few jobs under compute-sanitizer: accesses outside of what was allocated, and races in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_check import run as runner
from gpu_check.arena import is_dry
from gpu_check.outcome import PASSED, Outcome, StepFailedError, StepSkippedError

_CODE = 97
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda-13/bin", "/opt/cuda/bin")
# The tool waits for a Python that takes its time to import torch.
_OPTIONS = ("--launch-timeout", "0", "--error-exitcode", str(_CODE))


class _Tool(NamedTuple):
    """A tool of compute-sanitizer's, its own options, and the step that it watches."""

    name: str
    jobs: str
    options: tuple[str, ...] = ()


# Calls that fail are no errors here: torch and pdkv ask the driver for functions and addresses that it may not know.
_MEMORY = _Tool("memcheck", "kernels-small", ("--report-api-errors", "no"))
_RACES = _Tool("racecheck", "kernels-races")
# The tool is known to see no order in the arrival of `cp.async.bulk` at a barrier, which is what this kernel waits by.
_DOUBTED = "copy_bulk"


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
    """Runs random jobs under memcheck.

    Raises:
        StepSkippedError: There is no such tool.
        StepFailedError: It found something, got nowhere in time, or the jobs went wrong under it.
    """
    return _under(_MEMORY, budget_s)


def races(budget_s: float) -> Outcome:
    """Runs a job of each kind of kernel that adds up checksums under racecheck.

    Raises:
        StepSkippedError: There is no such tool.
        StepFailedError: It found something, got nowhere in time, or the jobs went wrong under it.
    """
    return _under(_RACES, budget_s)


def _under(tool: _Tool, budget_s: float) -> Outcome:
    if is_dry():
        raise StepSkippedError("the stand-in's memory is the host's, which the Rust tests run under sanitizers")
    path = find()
    if path is None:
        raise StepSkippedError(
            "no compute-sanitizer on PATH, in /usr/local/cuda/bin or among the wheels", "compute-sanitizer"
        )
    command = [path, "--tool", tool.name, *tool.options, *_OPTIONS, sys.executable, "-m", "gpu_check"]
    # Each tensor an allocation of its own: within a segment of torch's allocator the tool sees no border.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            [*command, "--step", tool.jobs, "--step-budget", f"{budget_s / 2:.1f}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=budget_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StepFailedError(f"under `{path}` a few jobs took longer than {budget_s:.0f} s") from error
    lines = done.stdout.splitlines()
    said = runner.said(lines)
    found = [line for line in lines if "Race reported" in line]
    doubted = [line.strip("= ") for line in found if _DOUBTED in line]
    only_doubted = done.returncode == _CODE and bool(found) and len(doubted) == len(found)
    if said is None or (done.returncode and not only_doubted):
        raise StepFailedError(f"{tool.name} ended with {done.returncode}: {_last(lines)}")
    if said.state != PASSED:
        raise StepFailedError(f"under {tool.name} the jobs went wrong: {said.text}")
    summary = next((line.strip("= ") for line in reversed(lines) if "SUMMARY" in line), "no summary")
    return Outcome(
        text=f"{tool.name}: {summary}; {said.text}",
        facts={"tool": path, "jobs": said.facts, "doubted": doubted},
        absent=[f"{tool.name}'s word on the bulk kernel, which it does not follow"] if doubted else [],
    )


def _last(lines: Sequence[str]) -> str:
    """What the tool said first and last: the first of its findings, which tells most, is at the front."""
    own = [line for line in lines if line.strip() and not line.startswith(runner.MARK)]
    found = [line for line in own if line.startswith("=========") and line.strip("= ")]
    return " / ".join([*found[:8], *own[-6:]])
