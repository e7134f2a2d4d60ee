"""Fixtures of the attacks: the transports, processes that end with their test, and how often things are tried."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attacks.far import Far, Zygote

# `unix` is the transport `tcp` between processes that may not trace each other: it then takes Unix-domain streams.
SETTINGS: dict[str, dict[str, Any]] = {
    "shm": {"transports": ["shm"], "pool": True},
    "cma": {"transports": ["cma"]},
    "tcp": {"transports": ["tcp"]},
    "unix": {"transports": ["tcp"], "alone": True},
}


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
        far = Far(zygote, name=name, **{**SETTINGS[transport], **settings})
        started.append(far)
        return far

    yield start
    for far in started:
        far.close()


@pytest.fixture(params=list(SETTINGS))
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def rounds() -> Callable[[int], int]:
    """How often to try, given the usual number: `PDKV_ATTACK_ROUNDS` multiplies it."""
    factor = float(os.environ.get("PDKV_ATTACK_ROUNDS", "1"))
    return lambda usual: max(1, round(usual * factor))
