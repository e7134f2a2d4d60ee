"""The two ends that most tests here begin with: worker sides over numpy arrays, without an LLM engine."""

from __future__ import annotations

import pytest

from connectors.sides import consuming, producing


@pytest.fixture
def producer():
    with producing() as side:
        yield side


@pytest.fixture
def consumer():
    with consuming() as side:
        yield side
