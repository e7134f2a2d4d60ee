"""Fixtures of the attacks: the transports, processes that end with their test, and how often things are tried."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attacks import lanes
from attacks.far import Far, Zygote

# `unix` is the transport `tcp` between processes that may not trace each other: it then takes Unix-domain streams.
# `ucx` are messages through shared memory, `ucx-put` is put and get by the kernel; the others run with the slow tests.
SETTINGS: dict[str, dict[str, Any]] = {
    "shm": {"transports": ["shm"], "pool": True},
    "cma": {"transports": ["cma"]},
    "tcp": {"transports": ["tcp"]},
    "unix": {"transports": ["tcp"], "alone": True},
    "ucx": lanes.lane("posix,cma", "am"),
    "ucx-put": lanes.lane("posix,cma", "put"),
    "ucx-tcp": lanes.lane("tcp", "am"),
    "ucx-tcp-put": lanes.lane("tcp", "put"),
    "ucx-system": lanes.lane("posix,cma", "am", "system"),
    "ucx-system-put": lanes.lane("posix,cma", "put", "system"),
}
FAST = ("shm", "cma", "tcp", "unix", "ucx", "ucx-put")
# Where puts and gets are emulated, which only `one_sided="any"` allows, UCX itself can end the owner's process: a
# distribution's copy by its assertions, newer ones when an answer can't be sent any more, because the writer or reader
# was stopped or closed in the middle, or when there is no descriptor left. The guide says so; tests that end nobody
# still run.
FRAGILE = ("ucx-system-put", "ucx-tcp-put")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def start(zygote: Zygote) -> Iterator[Callable[..., Far]]:
    """Starts an engine in a process of its own, which ends with the test."""
    started: list[Far] = []

    def start(name: str, transport: str = "tcp", **settings: Any) -> Far:
        if transport.startswith("ucx"):
            lanes.need("system" if "system" in transport else None)
        far = Far(zygote, name=name, **{**SETTINGS[transport], **settings})
        started.append(far)
        return far

    yield start
    for far in started:
        far.close()


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SETTINGS if name not in FRAGILE
    ]
)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def rounds() -> Callable[[int], int]:
    """How often to try, given the usual number: `PDKV_ATTACK_ROUNDS` multiplies it."""
    factor = float(os.environ.get("PDKV_ATTACK_ROUNDS", "1"))
    return lambda usual: max(1, round(usual * factor))
