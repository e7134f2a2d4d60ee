"""These tests are run by the environment that `make vllm` makes; elsewhere there is nothing to collect."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from with_vllm import models
from with_vllm.engines import Pair
from with_vllm.fleet import Fleet

collect_ignore_glob = ["test_*.py"] if find_spec("vllm") is None else []


@pytest.fixture(scope="session")
def connector():
    """Which connector is tried: pdkv's, or vLLM's own where the question is whether the tests around it work."""
    return os.environ.get("PDKV_TEST_CONNECTOR", "pdkv")


@pytest.fixture(scope="session")
def logs(tmp_path_factory):
    """Where engines and servers write what they say."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def tiny():
    return models.tiny()


@pytest.fixture(scope="session")
def fleet(logs, connector):
    fleet = Fleet(logs, connector)
    try:
        yield fleet.wait()
    finally:
        in_order = fleet.close()
    assert in_order


@pytest.fixture(scope="session")
def plain_pair(logs, tiny, connector):
    pair = Pair("plain", logs, tiny, connector)
    yield pair
    assert pair.close()


@pytest.fixture
def pair(plain_pair):
    """Two engines with nothing in their prefix caches, and as many free blocks after a test as before it."""
    plain_pair.forget()
    before = plain_pair.free_blocks()
    yield plain_pair
    plain_pair.forget()
    assert plain_pair.free_blocks() == before
