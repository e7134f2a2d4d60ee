"""Where installed wheels keep a UCX. Imports none of them, and opens nothing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["folders"]

# Best first. NIXL's bundle has RDMA, and its hashed names stand beside another copy; of its two, the one for
# CUDA 12 runs on the drivers of both.
_NIXL = ("nixl_cu12", "nixl_cu13", "nixl")


def folders() -> list[tuple[str, str]]:
    """Returns `(origin, folder)` of each installed wheel that brings a UCX, best first."""
    found = [
        ("nixl wheel", folder.with_name(f"{folder.name}.libs")) for name in _NIXL for folder in _package_folders(name)
    ]
    found += [("libucx wheel", folder / "lib") for folder in _package_folders("libucx")]
    return [(origin, str(folder)) for origin, folder in found if any(folder.glob("libucp*.so*"))]


def _package_folders(name: str) -> list[Path]:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return []  # half an installation, or one that refuses to be looked at
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
