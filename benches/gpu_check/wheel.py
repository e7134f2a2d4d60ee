"""Finds pdkv on a machine where nothing can be built or fetched: installed, or in a wheel that was carried there."""

from __future__ import annotations

import importlib.util
import tempfile
import zipfile
from pathlib import Path


def folder(wheels: Path) -> Path | None:
    """Gives the folder that must be on `sys.path`, or `None` where pdkv can be imported already.

    A wheel is not installed, for that takes pip and a place to write to: it is unpacked, the newest that there is.

    Raises:
        FileNotFoundError: pdkv is neither installed nor in a wheel.
    """
    spec = importlib.util.find_spec("pdkv")
    if spec is not None and spec.origin and list(Path(spec.origin).parent.glob("_core*.so")):
        return None
    found = sorted(wheels.glob("pdkv-*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(
            f"pdkv is not installed, and `{wheels}` has no wheel of it: make wheel, and carry it there"
        )
    unpacked = Path(tempfile.mkdtemp(prefix="pdkv-wheel-"))
    with zipfile.ZipFile(found[-1]) as archive:
        archive.extractall(unpacked)
    return unpacked
