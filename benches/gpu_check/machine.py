"""Step: what this machine is: GPU, driver, torch, and what `pdkv doctor` says of them."""

from __future__ import annotations

import platform
import shutil
import subprocess
from typing import Any

import pdkv
from gpu_check.arena import open_arena
from gpu_check.outcome import Outcome
from pdkv._core import CudaLoop, cuda_probe

_QUERY = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,mig.mode.current"


def run(_budget_s: float) -> Outcome:
    """Looks.

    Raises:
        PdkvError: There is no GPU to check.
    """
    arena, loop = open_arena(), CudaLoop()
    facts: dict[str, Any] = {
        "pdkv": pdkv.build_info(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "computes": arena.name,
        "gpus": arena.devices(),
        "loop": loop.facts,
        "probe": cuda_probe(),
    }
    if not arena.dry:
        import torch

        facts["torch"] = torch.__version__
    tool = shutil.which("nvidia-smi")
    if tool and not arena.dry:
        done = subprocess.run([tool, _QUERY, "--format=csv"], capture_output=True, text=True, timeout=20, check=False)
        facts["nvidia_smi"] = done.stdout.strip().splitlines()
    return Outcome(
        text=f"{arena.devices()} × {loop.facts['name']}, {loop.facts['origin']}, {pdkv.build_info()}", facts=facts
    )
