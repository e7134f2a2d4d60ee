"""Says which folders of tests belong to another environment than the one that runs."""

from __future__ import annotations

from importlib.util import find_spec


def pytest_report_header():
    """Names what is left out here, so that it isn't left out in silence."""
    if find_spec("torch") is None:
        return "tests/with_torch is left out: no torch here. `make test-torch` runs it"
    return None
