"""`make gpu-check DRY=1`: the steps with numpy in torch's place, and as on hardware, with a torch on the stand-in.

    python -m with_torch.gpu_steps --out OUT [options of gpu-check]

What torch lacks here is in tests/gpu_torch, and so are cupy, NIXL and compute-sanitizer in name. With torch all steps
share a process, which loads torch once. The two runs go on at the same time, for each waits a lot, and are told one
after the other. Last comes what was run, and on what; the exit code says whether they showed what they can.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

from gpu_check import account
from gpu_check.far import UCX_POLICY
from gpu_check.outcome import FAILED, SKIPPED

from with_torch.shim import ROOT, SHIM, with_gpu

IN_NAME = {
    "sanitizer": "a script in compute-sanitizer's name runs the jobs, and finds nothing",
    "racecheck": "the same script",
    "nixl": "two agents in NIXL's name copy by the stand-in",
    "ucx": "UCX emulates an adapter",
    "expandable segments": "the segments are the stand-in's",
    "protocols": "arrays in cupy's name, over torch",
    "capture": "a graph is a list of calls",
}
# That a step passed with what was there for it, and did not leave it out.
WITH_TORCH = {
    "machine": '"computes": "torch"',
    "kernels": "by torch",
    "two processes": "pinned.*by torch|by torch.*pinned",
    "plans": "by torch",
    "host": "by torch",
    "sanitizer": "memcheck: ERROR SUMMARY: 0 errors; [0-9]+ jobs, 25 kernels",
    "racecheck": "0 errors; pdkv2_copy_vectors_16_sums, pdkv2_copy_bulk_sums",
    "nixl": '"nixl_gb_s".*"once_gb_s".*"times_nixl"',
    "staged": "by torch",
    "expandable segments": "several segments",
    "protocols": '"cupy": true',
    "capture": "launches were captured",
}
WITH_NUMPY = {"ucx": "over ucx"}
_NEVER = """
not run, for they need hardware: compute-sanitizer, NIXL and cupy themselves; torch's allocator, streams and captures on
a GPU; an RDMA adapter; a link between GPUs or to the host; a GPU's memory system. No speed means anything, so no floor
is judged. With torch the steps are fewer and smaller, have one GPU, and neither a deadline nor a process of their own.
"""


def _steps(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "gpu-check.json").read_text())["steps"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    given, options = parser.parse_known_args()
    out, with_torch = given.out, given.out / "torch"
    command = [sys.executable, SHIM / "run_steps.py", "--budget", "1000000", *options, "--out", with_torch]
    # UCX fails to emulate an adapter on memory that the stand-in lets the CPU touch, as torch needs it here.
    environment = {**with_gpu(), UCX_POLICY: "rdma"}
    with subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True, cwd=ROOT, env=environment) as other:
        _say("with numpy in torch's place, each step in a process:")
        command = [sys.executable, "-m", "gpu_check", "--dry", *options, "--out", out]
        code = subprocess.run(command, check=False).returncode
        _say("\nwith a torch whose GPU is the stand-in:")
        for line in other.stdout:
            sys.stdout.write(line)
    codes = {out: code, with_torch: other.returncode}
    for folder, code in codes.items():
        if not (folder / "gpu-check.json").exists():
            _say(f"`{folder}` got no results")
            return code or 1
    numpy, torch = _steps(out), _steps(with_torch)
    missing = [f"`{name}` failed with numpy: {said['text']}" for name, said in numpy.items() if said["state"] == FAILED]
    missing += account.unshown(torch, WITH_TORCH)
    # Without a wheel of UCX nothing emulates an adapter.
    missing += account.unshown(numpy, WITH_NUMPY if "PDKV_UCX_LIBRARY" in os.environ else {})
    _say("\n".join(["", *account.table(numpy, torch, IN_NAME), _NEVER, *missing]))
    # A run that was asked for nothing but what it leaves out is not good, and yet all is well.
    failed = [folder for folder, code in codes.items() if code and {SKIPPED} != _states(folder)]
    return 1 if failed or missing else 0


def _states(folder: Path) -> set[str]:
    return {step["state"] for step in _steps(folder).values()}


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
