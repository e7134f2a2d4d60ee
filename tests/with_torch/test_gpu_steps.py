"""gpu-check as on hardware, not as a dry run: torch's own tensors, memory and streams, on the stand-in for the driver.

What torch lacks here is in tests/gpu_torch, and so are cupy, NIXL and compute-sanitizer in name. Speeds mean nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from gpu_check.outcome import PASSED, SKIPPED
from gpu_check.steps import STEPS

from with_torch.shim import ROOT, SHIM, with_gpu

# All steps in one test, which takes a minute or two where nothing else is done.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]


def run_steps(out):
    """What each step says, all of them run in one process."""
    command = [sys.executable, SHIM / "run_steps.py", "--out", out, "--budget", "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=with_gpu(), check=False)
    assert (out / "gpu-check.json").exists(), done.stdout + done.stderr
    return json.loads((out / "gpu-check.json").read_text())["steps"]


def test_every_step_passes_and_what_needs_an_adapter_is_named(tmp_path):
    steps = run_steps(tmp_path)
    assert set(steps) == {step.name for step in STEPS if not step.hidden}
    assert {name: step["absent"] for name, step in steps.items() if step["state"] == SKIPPED} == {
        "ucx": ["a GPU that `ucx` reaches"]
    }
    assert not {name: step for name, step in steps.items() if step["state"] not in (PASSED, SKIPPED)}
    # The libraries and tools were there.
    assert steps["machine"]["facts"]["computes"] == "torch"
    assert steps["protocols"]["facts"]["cupy"]
    assert "several segments" in steps["expandable segments"]["text"]
    assert any("pinned" in name for name in steps["two processes"]["facts"])
    assert re.match("memcheck: ERROR SUMMARY: 0 errors; [0-9]+ jobs, 25 kernels", steps["sanitizer"]["text"])
    assert re.match(
        "racecheck: .* 0 errors; pdkv2_copy_vectors_16_sums, pdkv2_copy_bulk_sums", steps["racecheck"]["text"]
    )
    assert [row["block_bytes"] for row in steps["nixl"]["rows"]] == [16 << 10]
    assert {"nixl_gb_s", "once_gb_s", "times_nixl"} <= set(steps["nixl"]["rows"][0])
    assert steps["two processes"]["absent"] == ["a second GPU"]
