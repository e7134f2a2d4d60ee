"""Medians of a few takes, and rates."""

from __future__ import annotations

import statistics
from collections.abc import Callable

TAKES = 5


def median_s(take: Callable[[], float], takes: int = TAKES) -> float:
    """Runs once to warm up, then several times; gives the median of the seconds."""
    take()
    return statistics.median(take() for _ in range(takes))


def rate(nbytes: int, seconds: float) -> float:
    """Gives GB/s (10^9 bytes)."""
    return nbytes / max(seconds, 1e-12) / 1e9
