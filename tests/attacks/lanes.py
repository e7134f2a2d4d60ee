"""Lanes of UCX to attack: over which of its transports, in which manner, with which copy of the library.

Knows how an engine is told; what a lane then does is for the tests to find out.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest

import pdkv
from pdkv import _core, wheels

# What UCX's `TLS` is forced to. The first is what two processes of a host take when they may choose.
TLS = ("posix,cma", "sysv,cma", "sysv", "tcp", "all")
# Put and get, however UCX carries them, or messages that the receiver places.
MANNERS = {"put": "any", "am": "never"}


def copies() -> dict[str, str]:
    """The copies of UCX to be had, by a short name, those of the environment first."""
    found: dict[str, str] = {}
    for path in filter(None, os.environ.get("PDKV_TEST_UCX", "").split(":")):
        found.setdefault(next((name for name in ("nixl", "libucx") if name in path), "other"), path)
    names = {"nixl wheel": "nixl", "libucx wheel": "libucx"}
    for origin, path, _, _, refused in _core.ucx_candidates(wheels.folders()):
        if refused is None:
            found.setdefault(names.get(origin, origin), path)
    return found


COPIES = copies()


@functools.cache
def version(copy: str) -> tuple[int, ...]:
    """The release of a copy, read in a process of its own."""
    ask = "import sys; from pdkv import _core; print(_core.ucx_probe(sys.argv[1])['version'])"
    said = subprocess.run([sys.executable, "-c", ask, COPIES[copy]], capture_output=True, text=True, check=True)
    return tuple(map(int, said.stdout.split(".")))


def need(copy: str | None = None) -> None:
    """Leaves a test out, and says why, where there is no UCX, or not this copy; CI insists on having them."""
    if COPIES if copy is None else copy in COPIES:
        return
    what = f"UCX here but {', '.join(COPIES) or 'none'}, and none called {copy}" if copy else "no UCX here"
    assert os.environ.get("PDKV_UCX_REQUIRED") != "1", what
    pytest.skip(f"{what}: `make ucx` installs some")


def lane(tls: str, manner: str, copy: str | None = None) -> dict[str, Any]:
    """What an engine is started with that shall have such lanes and no other way."""
    policy = MANNERS.get(manner, manner)
    library = COPIES.get(copy) if copy else None
    return {"transports": ["ucx"], "ucx": pdkv.UcxConfig(library=library, one_sided=policy, settings={"TLS": tls})}
