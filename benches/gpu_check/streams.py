"""Step: work that is still under way on a stream when a transfer is asked for, and must come first.

Each check asks a stream for something slow and then for a write or a read of the very blocks, and at once for the
transfer, with `stream=`. Without waiting the transfer would overtake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pdkv
from gpu_check.arena import Arena, Buffer, open_arena
from gpu_check.outcome import Outcome, StepFailedError
from gpu_check.pattern import random_bytes
from pdkv._core import CudaLoop

_BLOCK_BYTES, _BLOCKS = 64 << 10, 16
_NBYTES = _BLOCK_BYTES * _BLOCKS
_SLOW_CYCLES = 400_000_000  # some 0.2 s of a GPU's clock
_SLOW_COPIES = 64


class Work(Protocol):
    """A stream that is slow.

    Attributes:
        stream: What `stream=` is given.
    """

    stream: Any

    def later(self, dst: Buffer, src: Buffer) -> None:
        """Asks for something slow, and then for a copy."""


class TorchWork:
    """A stream of torch's."""

    def __init__(self) -> None:
        """Makes it."""
        import torch

        self._torch, self.stream = torch, torch.cuda.Stream()

    def later(self, dst: Any, src: Any) -> None:
        """Spins on the GPU, then copies."""
        with self._torch.cuda.stream(self.stream):
            self._torch.cuda._sleep(_SLOW_CYCLES)
            dst.owner.copy_(src.owner)


class DryWork:
    """A stream of the stand-in's, where each look at a stream makes one step."""

    def __init__(self) -> None:
        """Makes it."""
        self._loop = CudaLoop()
        self.stream = self._loop.stream

    def later(self, dst: Buffer, src: Buffer) -> None:
        """Copies many times over, the last time what counts."""
        for _ in range(_SLOW_COPIES):
            self._loop.copy(dst.address, dst.address, 1)
        self._loop.copy(dst.address, src.address, dst.nbytes)


class Pair:
    """Two engines of this process with a buffer each, registered as a cache and as raw memory."""

    def __init__(self, arena: Arena) -> None:
        """Opens and connects them."""
        self._arena = arena
        self.buffers = [arena.empty(_NBYTES) for _ in range(4)]
        self.engines = [pdkv.Engine(name) for name in ("producer", "consumer")]
        raw = [arena.tensor(buffer, (_BLOCKS, _BLOCK_BYTES // 2), (0, 1)) for buffer in self.buffers]
        self.caches = [
            engine.register_kv_cache({"layers.0": tensor}, layout="BC", block_tokens=16)
            for engine, tensor in zip(self.engines, raw, strict=False)
        ]
        self.regions = [
            engine.register(buffer.owner) for engine, buffer in zip(self.engines, self.buffers, strict=False)
        ]
        self.peer = self.engines[1].connect(str(self.engines[0].address))

    def put(self, number: int, seed: int) -> Any:
        """Fills a buffer; gives what is in it."""
        flat = self._arena.flat(random_bytes(_NBYTES, seed))
        self._arena.write(self.buffers[number], flat)
        return flat

    def wrong(self, number: int, flat: Any) -> int:
        """Counts wrong bytes of a buffer."""
        return self._arena.wrong(self.buffers[number], flat)

    def close(self) -> None:
        """Closes the engines."""
        for engine in self.engines:
            engine.close()


_ALL = list(range(_BLOCKS))


def _export(pair: Pair, work: Work, *, told: bool = True) -> int:
    """Blocks are written by the stream when they are exported."""
    fresh = pair.put(2, 1)
    pair.put(0, 2)
    work.later(pair.buffers[0], pair.buffers[2])
    export = pair.caches[0].export(_ALL, stream=work.stream if told else None)
    pair.caches[1].pull(export.reference, _ALL, require="cuda").wait()
    return pair.wrong(1, fresh)


def _pull(pair: Pair, work: Work) -> int:
    """The blocks that a pull writes are still read by the stream."""
    old = pair.put(1, 3)
    pair.put(0, 4)
    export = pair.caches[0].export(_ALL)
    work.later(pair.buffers[3], pair.buffers[1])
    pair.caches[1].pull(export.reference, _ALL, require="cuda", stream=work.stream).wait()
    return pair.wrong(3, old)


def _write(pair: Pair, work: Work) -> int:
    """What a raw write reads is still written by the stream."""
    fresh = pair.put(3, 5)
    pair.put(1, 6)
    work.later(pair.buffers[1], pair.buffers[3])
    pair.peer.write(pair.regions[0].describe(), pair.regions[1], require="cuda", stream=work.stream).wait()
    return pair.wrong(0, fresh)


def _read(pair: Pair, work: Work) -> int:
    """What a raw read writes is still read by the stream."""
    old = pair.put(1, 7)
    pair.put(0, 8)
    work.later(pair.buffers[2], pair.buffers[1])
    pair.peer.read(pair.regions[1], pair.regions[0].describe(), require="cuda", stream=work.stream).wait()
    return pair.wrong(2, old)


def _handle(pair: Pair, work: Work) -> int:
    """The same as `_export`, with the stream's handle as a number."""
    plain = work.stream if isinstance(work.stream, int) else work.stream.cuda_stream
    return _export(pair, _Renamed(work, plain))


class _Renamed:
    def __init__(self, work: Work, stream: int) -> None:
        self._work, self.stream = work, stream

    def later(self, dst: Buffer, src: Buffer) -> None:
        self._work.later(dst, src)


CHECKS: dict[str, Callable[[Pair, Work], int]] = {
    "export": _export,
    "export, by handle": _handle,
    "pull": _pull,
    "write": _write,
    "read": _read,
}


def run(_budget_s: float) -> Outcome:
    """Runs all checks, and shows what happens without `stream=`.

    Raises:
        StepFailedError: A transfer overtook what it had to wait for.
    """
    arena = open_arena()
    pair, work = Pair(arena), DryWork() if arena.dry else TorchWork()
    try:
        overtaken = {name: wrong for name, check in CHECKS.items() if (wrong := check(pair, work))}
        without = _export(pair, work, told=False)
    finally:
        pair.close()
    if overtaken:
        raise StepFailedError(f"wrong bytes, for the transfer came first: {overtaken}")
    return Outcome(
        text=f"{len(CHECKS)} transfers waited for a slow stream; without `stream=` {without} bytes would be wrong",
        facts={"checks": list(CHECKS), "wrong_without_stream": without},
    )
