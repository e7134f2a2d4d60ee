"""Step: host memory to a GPU and back: kernels over mapped memory against batches of the copy engine, and a loop.

The host's side is a pool of pdkv's, registered with the driver as the `cuda` transport does it. Of the kernels `few` is
what that transport takes: as many blocks as fill the link.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import numpy as np

from gpu_check.arena import Arena, Buffer, open_arena
from gpu_check.caches import copied
from gpu_check.outcome import Outcome, StepFailedError
from gpu_check.speed import ways
from gpu_check.timing import median_s, rate
from pdkv import Engine, PdkvError
from pdkv._core import CudaLoop

BLOCK_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
TOTAL_BYTES, DRY_TOTAL_BYTES = 128 << 20, 1 << 20


class _Link:
    """A pool of the host's and memory of the GPU, of the same size."""

    def __init__(self, arena: Arena, loop: CudaLoop, total: int) -> None:
        self.total, self.arena = total, arena
        self._pool = Engine.allocate(total, huge_pages=False)
        self._memory = np.frombuffer(memoryview(self._pool), np.uint8)
        self._zeros = arena.flat(np.zeros(total, np.uint8))
        self._buffer: Buffer = arena.empty(total)
        self._ends = loop.access(self._pool), self._buffer.address

    def addresses(self, *, inward: bool) -> tuple[int, int]:
        """Of the source and of the destination."""
        return self._ends if inward else self._ends[::-1]

    def write(self, content: Any, *, inward: bool) -> None:
        """Fills the source, and clears the destination."""
        self._put(content, device=not inward)
        self.clear(inward=inward)

    def clear(self, *, inward: bool) -> None:
        """Makes the destination zeros."""
        self._put(self._zeros, device=inward)

    def expected(self, content: Any, block_bytes: int, ids: list[list[int]]) -> Any:
        """What the destination must hold: the source's blocks at their new places, which are all there are."""
        expected = copied(content)
        into, from_ = (
            self.arena.shaped(flat, (self.total // block_bytes, block_bytes // 2), (0, 1))
            for flat in (expected, content)
        )
        into[self.arena.index(ids[1])] = from_[self.arena.index(ids[0])]
        return expected

    def wrong(self, expected: Any, *, inward: bool) -> int:
        """Counts the bytes of the destination that differ."""
        if inward:
            return self.arena.wrong(self._buffer, expected)
        return int((self.arena.flat(self._memory) != expected).sum())

    def _put(self, content: Any, *, device: bool) -> None:
        if device:
            self.arena.write(self._buffer, content)
        else:
            self._memory[:] = self.arena.array(content)


def _row(loop: CudaLoop, link: _Link, block_bytes: int, *, inward: bool) -> dict[str, Any]:
    """Measures one direction, and compares what each way leaves with what the arena computes."""
    total, count = link.total, link.total // block_bytes
    draw = Random(block_bytes)
    ids = [draw.sample(range(count), count) for _ in range(2)]
    content = link.arena.random(total, block_bytes + inward)
    expected = link.expected(content, block_bytes, ids)
    link.write(content, inward=inward)
    src, dst = link.addresses(inward=inward)
    side = (block_bytes, 1, 0)
    found: dict[str, Any] = {"block_bytes": block_bytes, "direction": "to the GPU" if inward else "to the host"}

    def check(how: str) -> None:
        if wrong := link.wrong(expected, inward=inward):
            raise StepFailedError(f"{wrong} bytes are wrong {found['direction']} by {how} with blocks of {block_bytes}")
        link.clear(inward=inward)

    kernels: dict[str, Any] = {"kernel": {}, "few": {"most_blocks": loop.facts["link_blocks"]}}
    if any("bulk" in name for name in loop.kernels):
        kernels["bulk"] = {"bulk": True}
    for name, wishes in kernels.items():
        copy = loop.job(
            chunk_bytes=block_bytes,
            src=side,
            dst=side,
            axes=[(1, 0, 0), (1, 0, 0)],
            lanes=[(src, dst)],
            num_pages=count,
            src_pages=ids[0],
            dst_pages=ids[1],
            **wishes,
        )
        found[f"{name}_gb_s"] = rate(total, median_s(partial(copy.run, 2), takes=3))
        check(name)
    offsets: list[Any] = [np.asarray(table, np.uint64) * np.uint64(block_bytes) for table in ids]
    for name in ("batch", "loop"):
        try:
            copies = partial(loop.blocks, dst, src, offsets[1], offsets[0], block_bytes, name, 1)
            taken = median_s(copies, takes=3)
        except PdkvError as error:
            found[f"{name}_missing"] = str(error)
            continue
        found[f"{name}_gb_s"] = rate(total, taken)
        check(name)
    found["limit_gb_s"] = rate(total, median_s(lambda: loop.whole(dst, src, total, 2), takes=3))
    return found


def run(_budget_s: float) -> Outcome:
    """Measures both directions.

    Raises:
        StepFailedError: A byte is wrong.
    """
    arena, loop = open_arena(), CudaLoop()
    total = DRY_TOTAL_BYTES if arena.dry else TOTAL_BYTES
    link = _Link(arena, loop, total)
    rows = [_row(loop, link, block_bytes, inward=inward) for block_bytes in BLOCK_BYTES for inward in (True, False)]
    best = {row["direction"]: max(row["few_gb_s"] / row["limit_gb_s"] for row in rows) for row in rows}
    return Outcome(
        text="few blocks at best "
        + ", ".join(f"{share:.2f} of the copy engine {way}" for way, share in best.items())
        + f"; no byte is wrong (by {arena.name})",
        facts={"total_bytes": total, "link_blocks": loop.facts["link_blocks"], **ways(loop)},
        rows=rows,
    )
