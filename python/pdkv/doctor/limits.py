"""What the system lets a process of this user do."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from pdkv.doctor.finding import Finding

__all__ = ["examine"]

_GIB = 1 << 30
_ENOUGH_SHM = 256 << 20
_ENOUGH_FILES = 4096
_CAP_IPC_LOCK = 14
_HUGE_PAGES = "sys/kernel/mm/hugepages/hugepages-2048kB"


def examine(root: Path, *, has_rdma: bool) -> tuple[list[Finding], dict[str, Any]]:
    """Looks at the limits.

    Args:
        root: Where `/proc` and `/sys` are.
        has_rdma: Whether this host has RDMA devices, for which memory gets pinned.

    Returns:
        The findings, and the same as numbers.
    """
    memlock = None if _may_lock(root) else _finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    ptrace_scope = int(_read(root / "proc/sys/kernel/yama/ptrace_scope") or 0)
    shm = _size_of(root / "dev/shm")
    free = int(_read(root / _HUGE_PAGES / "free_hugepages") or 0)
    transparent = _chosen(_read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    open_files = _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    findings = [
        _memlock(memlock, has_rdma=has_rdma),
        _ptrace(ptrace_scope),
        _dev_shm(shm),
        _huge_pages(free, transparent),
        _open_files(open_files),
    ]
    facts = {
        "memlock_bytes": memlock,
        "ptrace_scope": ptrace_scope,
        "dev_shm_bytes": shm,
        "free_huge_pages": free,
        "transparent_huge_pages": transparent,
        "open_files": open_files,
    }
    return findings, facts


def _memlock(limit: int | None, *, has_rdma: bool) -> Finding:
    if limit is None:
        return Finding("locked memory", good=True, text="without limit")
    text = f"at most {_bytes(limit)}"
    if not has_rdma:
        return Finding("locked memory", good=True, text=f"{text}, which matters for RDMA only")
    return Finding(
        "locked memory",
        good=False,
        text=f"{text}: an adapter pins all registered memory, so a larger KV cache can't be registered for RDMA",
        hint="`ulimit -l unlimited`, `memlock` in /etc/security/limits.conf, or `--ulimit memlock=-1` for a container",
    )


def _ptrace(scope: int) -> Finding:
    if scope == 0:
        return Finding("ptrace", good=True, text="processes of one user may reach each other's memory (cma)")
    return Finding(
        "ptrace",
        good=False,
        text=f"`kernel.yama.ptrace_scope` is `{scope}`: cma works only where the trial below says so",
        hint="`sysctl kernel.yama.ptrace_scope=0`, or the capability SYS_PTRACE for a container",
    )


def _dev_shm(size: int | None) -> Finding:
    hint = "a larger tmpfs there, such as `--shm-size=1g` for a container; pools of pdkv do not need it"
    if size is None:
        return Finding("/dev/shm", good=False, text="there is none, which UCX's posix transport needs", hint=hint)
    text = f"{_bytes(size)}; pdkv's own pools need none of it, UCX's posix transport does"
    return Finding("/dev/shm", good=size >= _ENOUGH_SHM, text=text, hint=None if size >= _ENOUGH_SHM else hint)


def _huge_pages(free: int, transparent: str) -> Finding:
    if free:
        text = f"`{free}` of 2 MiB are free for pools; transparent ones are `{transparent}`"
        return Finding("huge pages", good=True, text=text)
    return Finding(
        "huge pages",
        good=False,
        text=f"none are reserved, pools use 4 KiB pages; transparent ones are `{transparent}`",
        hint="copies gain some 10 to 60 %: `sysctl vm.nr_hugepages=N`, each of 2 MiB, as many as the pools need",
    )


def _open_files(limit: int | None) -> Finding:
    if limit is None or limit >= _ENOUGH_FILES:
        text = "without limit" if limit is None else f"at most `{limit}`"
        return Finding("open files", good=True, text=text)
    return Finding(
        "open files",
        good=False,
        text=f"at most `{limit}`; a peer takes about ten, with UCX more",
        hint="`ulimit -n 65536`, or `nofile` in /etc/security/limits.conf",
    )


def _may_lock(root: Path) -> bool:
    # Whoever may lock memory at will is not held to the limit.
    for line in (_read(root / "proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _size_of(folder: Path) -> int | None:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return None
    return facts.f_blocks * facts.f_frsize


def _chosen(text: str | None) -> str:
    # The kernel shows the choice in brackets among the others.
    return (text or "[absent]").partition("[")[2].partition("]")[0]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _bytes(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / (1 << 20):.0f} MiB"
