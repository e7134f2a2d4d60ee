"""Says which folders of tests belong to another environment than the one that runs."""

from __future__ import annotations

from importlib.util import find_spec


def pytest_report_header():
    """Names what is left out here, so that it isn't left out in silence."""
    lines = []
    if find_spec("torch") is None:
        lines.append("tests/with_torch is left out: no torch here. `make test-torch` runs it")
    if find_spec("vllm") is None:
        lines.append("tests/with_vllm is left out: no vLLM here. `make test-vllm` runs it")
    return lines
