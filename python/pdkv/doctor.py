"""Looks at this machine and tries every transport between two processes of it."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from pdkv._core import Engine, Peer, RegionDescriptor, build_info
from pdkv.errors import PdkvError

__all__ = ["Finding", "examine"]

_BYTES = 1 << 16
_TIMEOUT_S = 10.0


class Finding(NamedTuple):
    """One thing that was looked at; `needed` things must be good for pdkv to work at all."""

    subject: str
    good: bool
    text: str
    needed: bool = False


def examine() -> list[Finding]:
    """Looks at everything; takes a second or two."""
    findings = [
        Finding("pdkv", good=True, text=build_info()),
        Finding("python", good=True, text=f"{platform.python_version()} on {platform.system()} {platform.release()}"),
        _ptrace(),
        _huge_pages(),
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "pdkv.doctor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            findings += _transports(child)
        finally:
            child.kill()
    return findings


def _ptrace() -> Finding:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    value = scope.read_text().strip() if scope.exists() else "0"
    if value == "0":
        return Finding("ptrace", good=True, text="processes of one user may reach each other's memory (cma)")
    return Finding("ptrace", good=False, text=f"`{scope}` is `{value}`: cma works only where the probe below says so")


def _huge_pages() -> Finding:
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    count = int(free.read_text()) if free.exists() else 0
    text = f"`{count}` of 2 MiB are free for pools" if count else "none are reserved, pools use 4 KiB pages"
    return Finding("huge pages", good=count > 0, text=text)


def _transports(child: subprocess.Popen[str]) -> list[Finding]:
    assert child.stdout is not None
    lines = [child.stdout.readline().strip() for _ in range(3)]
    if not all(lines):
        return [Finding("second process", good=False, text="it did not start", needed=True)]
    pooled, private = (RegionDescriptor.from_json(line) for line in lines[1:])
    findings = []
    with Engine("doctor", listen=None) as engine:
        peer = engine.connect(lines[0], timeout_s=_TIMEOUT_S)
        for name, usable, why in peer.links():
            if name == "inproc":
                continue  # says nothing about two processes
            source = pooled if name == "shm" else private
            good, text = _try(engine, peer, source, name) if usable else (False, why)
            findings.append(Finding(name, good=good, text=text, needed=name == "tcp"))
    return findings


def _try(engine: Engine, peer: Peer, source: RegionDescriptor, name: str) -> tuple[bool, str]:
    target = bytearray(_BYTES)
    try:
        transfer = peer.read(engine.register(target), source, require=name, timeout_s=_TIMEOUT_S)
        transfer.wait()
    except PdkvError as error:
        return False, str(error)
    if target != _pattern():
        return False, "the bytes that arrived are wrong"
    return True, f"moved {_BYTES} bytes, {transfer.path.detail}"


def _pattern() -> bytes:
    return bytes(range(256)) * (_BYTES // 256)


def _serve() -> None:
    """Is the second process: prints its address and two regions, then waits to be killed or orphaned."""
    with Engine("doctor-peer") as engine:
        pool = engine.allocate(_BYTES, huge_pages=False)
        private = bytearray(_pattern())
        memoryview(pool)[:] = private
        lines = [engine.address, *(engine.register(memory).describe().to_json() for memory in (pool, private))]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
