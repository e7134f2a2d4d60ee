"""Facts of this machine: what a number was measured on, and how busy others kept it. Reads /proc only."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import numpy as np

import pdkv
from pdkv.errors import CapacityError


def facts() -> dict[str, object]:
    """Describes the machine for the `host` part of a report."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _kib("MemTotal"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "transparent_hugepage": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shmem_hugepage": _text("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "hugetlb_free": int(_first("/proc/meminfo", "HugePages_Free") or 0),
        "ptrace_scope": _text("/proc/sys/kernel/yama/ptrace_scope") or "none",
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def versions() -> dict[str, str]:
    """Gives the versions that took part; `build` tells an optimized library from a debug one."""
    return {
        "pdkv": pdkv.__version__,
        "build": pdkv.build_info(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def default_threads() -> int:
    """Gives the copy threads to use unless told: the cores, at most four."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


def require_memory(needed: int, what: str) -> None:
    """Refuses early what would end in the out-of-memory killer.

    Raises:
        CapacityError: Less than `needed` bytes are available.
    """
    available = available_bytes()
    if available and needed > available * 0.9:
        raise CapacityError(
            f"{what} needs `{needed >> 20}` MiB, `{available >> 20}` MiB are available",
            hint="use a smaller `--isl`, `--burst`, `--total` or `--slots-factor`",
        )


def available_bytes() -> int:
    """Says how much memory can still be used; 0 where the system does not tell."""
    return _kib("MemAvailable")


class QuietGate:
    """Waits, within a budget, until other processes leave the cores alone, and notes the load it met."""

    def __init__(self, wait_s: float, budget_s: float, limit: float = 0.25) -> None:
        """Each call waits up to `wait_s`, all calls together up to `budget_s`."""
        self._wait_s, self._budget_s, self._limit = wait_s, budget_s, limit
        self.loads: list[float] = []

    def __call__(self) -> None:
        """Waits now. Both ends of the bench are idle here, so all load is foreign."""
        if self._wait_s <= 0:
            return
        end = time.monotonic() + min(self._wait_s, self._budget_s)
        while True:
            started = time.monotonic()
            load = busy_cores(0.05)
            self._budget_s -= time.monotonic() - started
            if load <= self._limit or time.monotonic() >= end:
                self.loads.append(load)
                return


def busy_cores(glance_s: float) -> float:
    """Measures how many cores' worth of work the machine does during a glance."""
    total, idle = _jiffies()
    time.sleep(glance_s)
    total_after, idle_after = _jiffies()
    if total_after == total:
        return 0.0
    return (1 - (idle_after - idle) / (total_after - total)) * (os.cpu_count() or 1)


def _jiffies() -> tuple[int, int]:
    numbers = [int(field) for field in _text("/proc/stat").partition("\n")[0].split()[1:9]]
    return (sum(numbers), numbers[3] + numbers[4]) if len(numbers) == 8 else (0, 0)


def _kib(key: str) -> int:
    return int(_first("/proc/meminfo", key).removesuffix("kB") or 0) << 10


def _first(path: str, key: str) -> str:
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
