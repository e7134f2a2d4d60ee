"""Moves bytes between two processes of this machine over every transport, to see which ones do.

`moves` is one process; it starts the other, `python -m pdkv.doctor.trial`. Nothing is judged here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from pdkv._core import Engine, Peer, RegionDescriptor
from pdkv.errors import PdkvError

__all__ = ["moves"]

_BYTES = 1 << 16
_TIMEOUT_S = 10.0
# UCX has engines of its own and comes last: whatever it does to the process, the others have been tried.
_PLAIN, _WITH_UCX = ("shm", "cma", "tcp"), ("ucx",)


def moves() -> Iterator[dict[str, Any]]:
    """Tries each transport; yields its name, whether it moved the bytes, and how or why not.

    The last of the plain ones are followed by what was chosen unasked: for memory in a pool, and for other memory.
    """
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            lines = [other.stdout.readline().strip() for _ in range(3)]
            if not all(lines):
                yield {"transport": "tcp", "good": False, "text": "the second process did not start"}
                return
            for names in (_PLAIN, _WITH_UCX):
                yield from _moves_over(names, *lines)
        finally:
            other.kill()


def _moves_over(names: tuple[str, ...], address: str, pooled: str, private: str) -> Iterator[dict[str, Any]]:
    with Engine("doctor", listen=None, transports=names) as engine:
        try:
            peer = engine.connect(address, timeout_s=_TIMEOUT_S)
        except PdkvError as error:
            yield from ({"transport": name, "good": False, "text": error.message, "hint": error.hint} for name in names)
            return
        sources = {"pool": RegionDescriptor.from_json(pooled), "private": RegionDescriptor.from_json(private)}
        for link in peer.links():
            if link.transport in names:
                source = sources["pool" if link.transport == "shm" else "private"]
                moved = _move(engine, peer, source, link.transport, None if link.usable else link.why)
                yield {"transport": link.transport, "gpu": link.gpu, **moved}
        if names == _PLAIN:
            for memory, source in sources.items():
                yield {"choice": memory, **_move(engine, peer, source, None, None)}


def _move(
    engine: Engine, peer: Peer, source: RegionDescriptor, name: str | None, refused: str | None
) -> dict[str, Any]:
    if refused is not None:
        return {"good": False, "text": refused}
    target = bytearray(_BYTES)
    try:
        transfer = peer.read(engine.register(target), source, require=name, timeout_s=_TIMEOUT_S)
        transfer.wait()
    except PdkvError as error:
        return {"good": False, "text": error.message, "hint": error.hint}
    if target != _pattern():
        return {"good": False, "text": "the bytes that arrived are wrong", "hint": "please report this"}
    path = transfer.path
    return {
        "good": True,
        "text": f"moved {_BYTES} bytes, {path.detail}",
        "path": path.transport,
        "detail": path.detail,
        "rdma": path.rdma,
        "staged": transfer.stats.staged_bytes > 0,
    }


def _pattern() -> bytes:
    return bytes(range(256)) * (_BYTES // 256)


def _serve() -> None:
    """Is the second process: prints its address and two regions, then waits to be killed or orphaned."""
    with Engine("doctor-peer", transports=_PLAIN + _WITH_UCX) as engine:
        pool = engine.allocate(_BYTES, huge_pages=False)
        private = bytearray(_pattern())
        memoryview(pool)[:] = private
        lines = [engine.address, *(engine.register(memory).describe().to_json() for memory in (pool, private))]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
