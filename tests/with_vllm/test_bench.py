"""`benches/vllm_handover.py` runs and its results are whole: a few small requests, no word on how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--setups pdkv --step-setups pdkv --model tiny --requests 2 --rounds 1 --tokens 65 --in-flight 4 --steps 20"


def test_both_measurements_of_a_few_requests(tmp_path, logs):
    output = tmp_path / "found.json"
    command = [sys.executable, ROOT / "benches/vllm_handover.py", *SMALL.split()]
    done = subprocess.run([*command, "--output", output, "--folder", logs], capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| `pdkv` | **" in done.stdout
    found = json.loads(output.read_text())

    first = found["first_token"]
    assert len(first["alone"]) == 2
    pdkv = first["setups"]["pdkv"]
    assert [set(times) for times in pdkv["times"]] == [{"prefill", "load", "local", "answer", "export"}] * 2
    assert (pdkv["wrong"], pdkv["failed"], pdkv["moved"]["failed"]) == (0, 0, 0)
    # 3 blocks a prompt and then the last of them again, for two prompts and one to warm up. What an engine has counted
    # last may not have reached its metrics yet.
    assert pdkv["moved"]["transfers"] >= 4
    assert set(pdkv["moved"]["paths"]) <= {"cma", "shm", "tcp"}

    steps = found["steps"]["pdkv"]
    assert steps["wrong"] == 0
    for role in ("exporting", "loading"):
        assert 0 < steps[role]["empty"]["median_us"] <= steps[role]["empty"]["p99_us"]
        assert steps[role]["begin"]["median_us"] > 0
