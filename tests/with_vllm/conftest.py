"""These tests are run by the environment that `make vllm` makes; elsewhere there is nothing to collect."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

collect_ignore_glob = ["test_*.py"] if find_spec("vllm") is None else []


@pytest.fixture(scope="session")
def connector():
    """Which connector is tried: `PDKV_TEST_CONNECTOR`, by default vLLM's own, to try the tests themselves."""
    return os.environ.get("PDKV_TEST_CONNECTOR", "nixl")


@pytest.fixture(scope="session")
def logs(tmp_path_factory):
    """Where engines and servers write what they say."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def tiny():
    from with_vllm import models

    return models.tiny()
