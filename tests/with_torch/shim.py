"""The environment of a process whose torch has one GPU, the stand-in for the driver: see tests/gpu_torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "tests/gpu_torch"


def with_gpu() -> dict[str, str]:
    """Builds the stand-in; gives the environment."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "standin"
    built = subprocess.run([ROOT / "scripts/standin-cuda.sh", folder], capture_output=True, text=True, check=True)
    library, image = built.stdout.split()
    paths = [SHIM, ROOT / "benches", os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PDKV_CUDA_LIBRARY": library,
        "PDKV_CUDA_IMAGE": image,
        "PDKV_STANDIN_OPEN": "1",  # what torch computes here the CPU does
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths))),
        "PATH": f"{SHIM / 'tools'}{os.pathsep}{os.environ['PATH']}",
    }
