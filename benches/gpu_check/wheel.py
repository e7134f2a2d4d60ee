"""Finds what the steps import on a machine where nothing can be built or fetched: installed, or in a carried wheel."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
import tempfile
import zipfile
from pathlib import Path

# torch, which is the third thing that the steps import, is the machine's own: it is what pdkv is compared with.
NEEDED = ("pdkv", "numpy")
_WITHOUT_GPU = "where there is no GPU: make gpu-check DRY=1"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def folders(wheels: Path) -> list[Path]:
    """Gives the folders that must be on `sys.path` so that all that is needed can be imported.

    A wheel is not installed, for that takes pip and a place to write to: it is unpacked, the newest that fits here.

    Raises:
        FileNotFoundError: Something is neither installed nor in a wheel.
    """
    return [_unpacked(name, wheels) for name in NEEDED if not _is_here(name)]


def check_machine() -> None:
    """Looks for what no wheel brings, before the first step.

    Raises:
        FileNotFoundError: This Python has no torch, or the machine no driver.
    """
    if importlib.util.find_spec("torch") is None:
        raise FileNotFoundError(
            f"`{sys.executable}` has no torch, with which the check compares: name a Python that has it, as in "
            f"make gpu-check GPU_PYTHON=/path/to/python; {_WITHOUT_GPU}"
        )
    try:
        ctypes.CDLL(os.environ.get("PDKV_CUDA_LIBRARY") or "libcuda.so.1")
    except OSError as error:
        raise FileNotFoundError(f"this machine has no CUDA driver ({error}); {_WITHOUT_GPU}") from None


def _is_here(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin:
        return False
    # A checkout in which nothing was built is no pdkv.
    return name != "pdkv" or any(Path(spec.origin).parent.glob("_core*.so"))


def _unpacked(name: str, wheels: Path) -> Path:
    found = [path for path in wheels.glob(f"{name}-*.whl") if _fits(path)]
    if not found:
        raise FileNotFoundError(
            f"{name} is not installed, and `{wheels}` has no wheel of it for Python {_PYTHON} on {platform.machine()}, "
            f"as `{sys.executable}` is: name another by GPU_PYTHON=/path/to/python, or run "
            f"`make wheel GPU_PYTHON_VERSION={_PYTHON}` where Rust is, and carry its `dist` there"
        )
    unpacked = Path(tempfile.mkdtemp(prefix=f"{name}-wheel-"))
    with zipfile.ZipFile(max(found, key=lambda path: path.stat().st_mtime)) as archive:
        archive.extractall(unpacked)
    return unpacked


def _fits(path: Path) -> bool:
    """Reads the tags in a wheel's name: for which Pythons it is, by which ABI, on which platforms."""
    pythons, abi, platforms = path.stem.rsplit("-", 3)[1:]
    this = f"cp{_PYTHON.replace('.', '')}" in pythons.split(".")
    return (this or abi in ("abi3", "none")) and (platforms == "any" or platform.machine() in platforms)
