"""Tensors of a GPU in lookup buffers and stores, with a torch whose GPU is the stand-in for the driver."""

from __future__ import annotations

import subprocess
import sys

import pytest

from with_torch.shim import ROOT, SHIM, with_gpu

pytestmark = pytest.mark.torch


def test_tensors_of_a_gpu_are_kept_and_come_to_another():
    command = [sys.executable, SHIM / "kept_tensors.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=with_gpu(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
