"""Every example runs as a user would run it, and says what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# What the output of each example must contain; an example without a row fails.
PROMISES = {
    "two_processes.py": [" 0 staged"],
}


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_runs_and_keeps_its_promise(example):
    run = subprocess.run([sys.executable, EXAMPLES / example], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    for promise in PROMISES[example]:
        assert promise in run.stdout
