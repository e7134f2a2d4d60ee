"""Where installed wheels keep a UCX. Imports none of them and opens nothing; no pathlib, for every engine asks."""

from __future__ import annotations

import os
from importlib.util import find_spec

__all__ = ["folders"]

# Best first. NIXL's bundle has RDMA, and its hashed names stand beside another copy; of its two, the one for
# CUDA 12 runs on the drivers of both.
_NIXL = ("nixl_cu12", "nixl_cu13", "nixl")


def folders() -> list[tuple[str, str]]:
    """Returns `(origin, folder)` of each installed wheel that brings a UCX, best first."""
    places = [("nixl wheel", f"{folder}.libs") for name in _NIXL for folder in _package_folders(name)]
    places += [("libucx wheel", f"{folder}/lib") for folder in _package_folders("libucx")]
    return [(origin, folder) for origin, folder in places if _has_ucp(folder)]


def _package_folders(name: str) -> list[str]:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return []  # half an installation, or one that refuses to be looked at
    return list(spec.submodule_search_locations or ()) if spec else []


def _has_ucp(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.startswith("libucp") and ".so" in entry.name for entry in entries)
    except OSError:
        return False
