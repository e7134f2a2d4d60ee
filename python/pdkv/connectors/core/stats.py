"""Counts what a worker side does, between two looks at it. Knows no metrics library, and can fail no transfer.

Values are plain: numbers, lists of numbers and one mapping, so that they may cross to another process as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

__all__ = ["COUNTERS", "SAMPLES", "Stats", "aggregate", "reduce"]

# One value for each transfer.
SAMPLES = ("xfer_time_seconds", "post_time_seconds", "bytes_transferred", "num_descriptors")
COUNTERS = (
    "num_failed_transfers",  # loads of which a transfer failed
    "num_failed_notifications",  # renewals and declines that the owner did not get
    "num_kv_expired_reqs",  # exports for which nobody came in time
    "num_notifications_after_expiry",  # pulls that came after the lease had ended
    "num_refused_references",  # loads whose reference or parameters were refused
    "num_recomputed_requests",  # loads that failed: the request ends with an error or is computed here
    "num_fenced_reads",  # transfers refused after bytes had moved
    "num_declined",  # exports given back without a pull
    "num_cancelled",  # loads that were cancelled here
    "num_failed_exports",  # export orders that could not be carried out
)
_PATHS = "paths"
_DROPPED = "num_dropped_samples"
# Samples kept between two looks, and in a sum of snapshots that nobody resets; what comes beyond is only counted.
_MAX_SAMPLES = 4096
_MAX_SUMMED = 1 << 16

Snapshot = dict[str, Any]


class Stats:
    """Counters and samples of one rank. Usable from every thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = _empty()
        self._touched = False

    def count(self, name: str, by: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._values[name] += by
            self._touched = True

    def transfer(self, *, seconds: float, post_seconds: float, nbytes: int, descriptors: int, path: str) -> None:
        """Notes a transfer that succeeded.

        Args:
            seconds: From its order to its end.
            post_seconds: Planning and posting.
            nbytes: Bytes moved.
            descriptors: Copies that it consisted of.
            path: Label of the transport.
        """
        with self._lock:
            self._touched = True
            paths = self._values[_PATHS]
            paths[path] = paths.get(path, 0) + 1
            if len(self._values[SAMPLES[0]]) >= _MAX_SAMPLES:
                self._values[_DROPPED] += 1
                return
            for name, value in zip(SAMPLES, (seconds, post_seconds, nbytes, descriptors), strict=True):
                self._values[name].append(value)

    def snapshot_and_reset(self) -> Snapshot | None:
        """Gives what was counted since the last call, or `None` if nothing was."""
        if not self._touched:
            return None
        with self._lock:
            values, self._values, self._touched = self._values, _empty(), False
        return values


def aggregate(one: Mapping[str, Any], other: Mapping[str, Any]) -> Snapshot:
    """Adds up two snapshots; neither is changed."""
    values = _empty()
    for part in (one, other):
        room = _MAX_SUMMED - len(values[SAMPLES[0]])
        for name in SAMPLES:
            values[name] += part.get(name, ())[:room]
        values[_DROPPED] += max(0, len(part.get(SAMPLES[0], ())) - room)
        for name in (*COUNTERS, _DROPPED):
            values[name] += part.get(name, 0)
        for path, number in part.get(_PATHS, {}).items():
            values[_PATHS][path] = values[_PATHS].get(path, 0) + number
    return values


def reduce(values: Mapping[str, Any]) -> dict[str, int | float]:
    """Sums a snapshot up for a log line: means, a percentile, totals, and the counters that are not zero."""
    times, posts = sorted(values.get(SAMPLES[0], ())), values.get(SAMPLES[1], ())
    sizes, descriptors = values.get(SAMPLES[2], ()), values.get(SAMPLES[3], ())
    line: dict[str, int | float] = {"transfers": len(times) + values.get(_DROPPED, 0)}
    if times:
        number = len(times)
        line |= {
            "mean transfer (ms)": round(1e3 * sum(times) / number, 3),
            "p90 transfer (ms)": round(1e3 * times[min(number - 1, number * 9 // 10)], 3),
            "mean post (ms)": round(1e3 * sum(posts) / number, 3),
            "mean size (MB)": round(sum(sizes) / number / 1e6, 3),
            "rate (MB/s)": round(sum(sizes) / 1e6 / (sum(times) or 1e-9), 3),
            "mean copies": round(sum(descriptors) / number, 1),
        }
    line |= {f"by {path}": number for path, number in sorted(values.get(_PATHS, {}).items())}
    counters = {name.removeprefix("num_").replace("_", " "): values.get(name, 0) for name in COUNTERS}
    return line | {name: number for name, number in counters.items() if number}


def _empty() -> Snapshot:
    return {**{name: [] for name in SAMPLES}, **dict.fromkeys((*COUNTERS, _DROPPED), 0), _PATHS: {}}
