"""`python -m gpu_check` where nothing is installed: a bare Python, and wheels that were carried there."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

import pdkv

ROOT = Path(__file__).resolve().parents[2]
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"


def wheel(dist, name, abi, *folders):
    """Packs installed folders as a wheel has them, at its top."""
    dist.mkdir(exist_ok=True)
    with zipfile.ZipFile(dist / f"{name}-1-{TAG}-{abi}-manylinux_2_28_{platform.machine()}.whl", "w") as archive:
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and not {"__pycache__", "tests"} & set(path.relative_to(folder).parts):
                    archive.write(path, path.relative_to(folder.parent))


@pytest.fixture
def bare(tmp_path):
    """A Python that has the standard library alone."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    return tmp_path / "venv/bin/python"


def run(python, dist, out):
    environment = {name: value for name, value in os.environ.items() if name.startswith("PDKV_")}
    command = [python, "-m", "gpu_check", "--dry", "--only", "machine,plans", "--wheels", dist, "--out", out]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=out.parent,
        env={**environment, "PYTHONPATH": str(ROOT / "benches")},
        check=False,
    )


def test_the_steps_run_from_carried_wheels_and_say_so_where_one_is_missing(bare, tmp_path):
    dist, out = tmp_path / "dist", tmp_path / "out"
    wheel(dist, "pdkv", "abi3", Path(pdkv.__file__).parent)
    done = run(bare, dist, out)
    assert (done.returncode, done.stdout) == (2, ""), "it fails before any step"
    assert "numpy is not installed" in done.stderr
    assert "make wheel" in done.stderr

    numpy = Path(np.__file__).parent
    wheel(dist, "numpy", TAG, numpy, numpy.with_name("numpy.libs"))
    done = run(bare, dist, out)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads((out / "gpu-check.json").read_text())["steps"]
    assert {name: step["state"] for name, step in steps.items()} == {"machine": "passed", "plans": "passed"}
    assert (out / "gpu-check.png").read_bytes().startswith(b"\x89PNG")
