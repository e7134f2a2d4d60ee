"""Step: a few random jobs under compute-sanitizer, which sees reads and writes outside of what was allocated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_check.arena import is_dry
from gpu_check.outcome import Outcome, StepFailedError, StepSkippedError

_CODE = 97
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda-13/bin", "/opt/cuda/bin")


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
        StepSkippedError: There is no such tool.
        StepFailedError: It found something.
    """
    if is_dry():
        raise StepSkippedError("the stand-in's memory is the host's, which the Rust tests run under sanitizers")
    tool = find()
    if tool is None:
        raise StepSkippedError("no compute-sanitizer on PATH, in /usr/local/cuda/bin or among the wheels")
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(_CODE), sys.executable, "-m", "gpu_check"]
    # Each tensor an allocation of its own: within a segment of torch's allocator the tool sees no border.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            [*command, "--step", "kernels-small", "--step-budget", str(budget_s / 2)],
            capture_output=True,
            text=True,
            timeout=budget_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StepSkippedError(f"under `{tool}` a few jobs took longer than {budget_s:.0f} s") from error
    last = " / ".join(line for line in done.stdout.splitlines()[-6:] if line.strip())
    if done.returncode:
        raise StepFailedError(f"compute-sanitizer ended with {done.returncode}: {last}")
    return Outcome(text=f"memcheck finds nothing: {last}", facts={"tool": tool})
