"""The example with vLLM runs as a user would run it, and proves what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/vllm_pd"


def test_example_runs_and_keeps_its_promise(tiny):
    command = [sys.executable, EXAMPLE / "run.py", "--model", tiny]
    # Python keeps what it has compiled, as where vLLM is installed in the usual way.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 tokens and their log-probabilities equal to those of one instance alone" in done.stdout
    assert int(re.search(r"^(\d+) bytes of KV cache were handed over$", done.stdout, re.MULTILINE)[1]) > 0


def test_lines_that_the_readme_shows_are_the_ones_it_prints():
    program, readme = ((EXAMPLE / name).read_text() for name in ("run.py", "README.md"))
    for shown in ("starting two instances of", "pdkv proxy at", "equal to those of one instance alone", "handed over"):
        assert shown in program
        assert shown in readme
