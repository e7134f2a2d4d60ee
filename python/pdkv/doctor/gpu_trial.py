"""Moves bytes from a GPU's memory in one process to a GPU's in another, to see whether `cuda` does.

`moves` is one process; it starts the other, `python -m pdkv.doctor.gpu_trial`. Nothing is judged here. It is apart from
the other trial, for a driver may take a process with it. `kernels` runs every kernel of each GPU.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from pdkv._core import CudaLoop, Engine, Pool, RegionDescriptor, buffer_address, cuda_count
from pdkv.errors import PdkvError

__all__ = ["kernels", "moves"]

_BYTES = 1 << 16
_TIMEOUT_S = 20.0
_NAMES = ("cuda", "tcp")


def moves() -> Iterator[dict[str, Any]]:
    """Tries it; yields whether the bytes moved, and how or why not."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            address, source = (other.stdout.readline().strip() for _ in range(2))
            if not source:
                yield {"transport": "cuda", "good": False, "text": "the second process did not start"}
                return
            yield {"transport": "cuda", **_move(address, RegionDescriptor.from_json(source))}
        finally:
            other.kill()


def kernels() -> Iterator[dict[str, Any]]:
    """Runs every kernel of each GPU on drawn jobs; yields whether bytes and checksums were a plain twin's, and how."""
    for device in range(cuda_count()):
        seed = secrets.randbits(32)
        try:
            ran = CudaLoop(device).try_kernels(seed)
        except PdkvError as error:
            text = f"{error.message} (seed {seed})"
            yield {"kernels": device, "good": False, "text": text, "hint": error.hint}
        else:
            text = f"{len(ran)} kernels left the right bytes, and checksums that tell"
            yield {"kernels": device, "good": True, "text": text, "hint": None}


def _move(address: str, source: RegionDescriptor) -> dict[str, Any]:
    try:
        with Engine("doctor", listen=None, transports=_NAMES) as engine:
            peer = engine.connect(address, timeout_s=_TIMEOUT_S)
            pool, target = engine.allocate(_BYTES, device="cuda"), bytearray(_BYTES)
            transfer = peer.read(engine.register(pool), source, require="cuda", timeout_s=_TIMEOUT_S)
            transfer.wait()
            _copy(target, pool, out=True)
    except PdkvError as error:
        return {"good": False, "text": error.message, "hint": error.hint}
    if target != _pattern():
        return {"good": False, "text": "the bytes that arrived are wrong", "hint": "please report this"}
    detail = transfer.path.detail
    return {"good": True, "text": f"moved {_BYTES} bytes between two processes, {detail}", "detail": detail}


def _copy(memory: bytearray, pool: Pool, *, out: bool) -> None:
    """Copies between host memory and a pool on a GPU, and waits."""
    loop, address = CudaLoop(pool.device or 0), buffer_address(memory)
    pair = (address, pool.address) if out else (pool.address, address)
    loop.copy(*pair, pool.nbytes)
    loop.wait()


def _pattern() -> bytearray:
    return bytearray(range(256)) * (_BYTES // 256)


def _serve() -> None:
    """Is the second process: prints its address and a region on the GPU, then waits to be killed or orphaned."""
    with Engine("doctor-peer", transports=_NAMES) as engine:
        pool = engine.allocate(_BYTES, device="cuda")
        _copy(_pattern(), pool, out=False)
        sys.stdout.write(f"{engine.address}\n{engine.register(pool).describe().to_json()}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
