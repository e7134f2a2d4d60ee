"""Says which folders of tests belong to another environment than the one that runs, and how hypothesis tries things."""

from __future__ import annotations

from importlib.util import find_spec

from hypothesis import HealthCheck, settings

import chance

# No example has to be quick, for the machine may be busy; and where the seed is fixed, examples are the same each time.
settings.register_profile(
    "pdkv",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=chance.FIXED is not None,
    database=None,
    print_blob=True,
)
settings.load_profile("pdkv")


def pytest_report_header():
    """Names what is left out here, so that it isn't left out in silence."""
    lines = []
    if find_spec("torch") is None:
        lines.append("tests/with_torch is left out: no torch here. `make test-torch` runs it")
    if find_spec("vllm") is None:
        lines.append("tests/with_vllm is left out: no vLLM here. `make test-vllm` runs it")
    return lines
