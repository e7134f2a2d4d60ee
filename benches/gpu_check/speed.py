"""Step: the table. Paged copies of one size after another, beside the device's own copy and beside other ways to do it.

Everything in a row is of one run: the same blocks, the same tables, timed by the device's events; every byte that moved
is compared. A block table is random on both sides, in pools half again as large.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np

from gpu_check.arena import Arena, Buffer, open_arena
from gpu_check.outcome import Outcome, StepFailedError
from gpu_check.timing import median_s, rate
from pdkv import PdkvError
from pdkv._core import CudaLoop

BLOCK_BYTES = (2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)
TOTAL_BYTES, DRY_TOTAL_BYTES = 512 << 20, 2 << 20
_SLOTS = 1.5
_ROUNDS = 4


class Blocks:
    """Two pools of blocks and a table into each."""

    def __init__(self, arena: Arena, total: int, block_bytes: int, src: Buffer, dst: Buffer) -> None:
        """Draws the tables."""
        self.arena, self.block_bytes, self.src, self.dst = arena, block_bytes, src, dst
        self.count = total // block_bytes
        self.pool = int(self.count * _SLOTS)
        draw = Random(block_bytes)
        self.src_ids, self.dst_ids = (draw.sample(range(self.pool), self.count) for _ in range(2))

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.count * self.block_bytes

    def kernel(self, loop: CudaLoop, *, bulk: bool) -> Any:
        """Prepares pdkv's copy."""
        side = (self.block_bytes, 1, 0)
        return loop.job(
            chunk_bytes=self.block_bytes,
            src=side,
            dst=side,
            axes=[(1, 0, 0), (1, 0, 0)],
            lanes=[(self.src.address, self.dst.address)],
            num_pages=self.count,
            src_pages=self.src_ids,
            dst_pages=self.dst_ids,
            sums=False,
            bulk=bulk,
        )

    def offsets(self, ids: list[int]) -> Any:
        """Gives the byte offsets of blocks."""
        return np.asarray(ids, np.uint64) * np.uint64(self.block_bytes)

    def views(self, flat: Any) -> Any:
        """Views flat bytes as blocks of 16-bit elements."""
        flat = flat[: self.pool * self.block_bytes]
        return self.arena.shaped(flat, (self.pool, self.block_bytes // 2), (0, 1))

    def verify(self, content: Any, what: str) -> None:
        """Compares all of the destination, whose other blocks must still be zero, and clears it.

        Raises:
            StepFailedError: A byte is wrong.
        """
        wrong = self._wrong(content)
        if wrong:
            raise StepFailedError(f"{wrong} bytes are wrong after {what} of blocks of {self.block_bytes} bytes")

    def _wrong(self, content: Any) -> int:
        found = self.arena.read(self.dst)
        blocks, source = self.views(found), self.views(content)
        into = self.arena.index(self.dst_ids)
        wrong = 2 * int((blocks[into] != source[self.arena.index(self.src_ids)]).sum())
        blocks[into] = 0
        wrong += int((found != 0).sum())
        found[:] = 0
        self.arena.write(self.dst, found)
        return wrong


def row(loop: CudaLoop, blocks: Blocks, content: Any, limit_s: float) -> dict[str, Any]:
    """Measures one size.

    Raises:
        StepFailedError: A byte is wrong.
    """
    size = {"block_bytes": blocks.block_bytes, "blocks": blocks.count, "limit_gb_s": rate(blocks.nbytes, limit_s)}
    seconds: dict[str, float] = {}
    facts: dict[str, Any] = {}
    for name, bulk in (("kernel", False), ("bulk", True)):
        copy = blocks.kernel(loop, bulk=bulk)
        seconds[name] = median_s(lambda copy=copy: copy.run(_ROUNDS))
        blocks.verify(content, f"{copy.kernels}")
        facts[f"{name}_entry"] = copy.kernels[0]
    best = min(seconds["kernel"], seconds["bulk"])
    offsets = [blocks.offsets(ids) for ids in (blocks.dst_ids, blocks.src_ids)]
    for name in ("loop", "batch"):
        try:
            seconds[name] = median_s(
                lambda name=name: loop.blocks(
                    blocks.dst.address, blocks.src.address, *offsets, blocks.block_bytes, name, 1
                ),
                takes=3,
            )
        except PdkvError as error:
            facts[f"{name}_missing"] = str(error)
            continue
        blocks.verify(content, name)
    seconds["torch"] = _by_index(blocks)
    rates = {f"{name}_gb_s": rate(blocks.nbytes, taken) for name, taken in seconds.items()}
    return {
        **size,
        **rates,
        **facts,
        "fraction": limit_s / best,
        "fraction_kernel": limit_s / seconds["kernel"],
        "fraction_bulk": limit_s / seconds["bulk"],
        "times_loop": seconds["loop"] / best if "loop" in seconds else None,
        "times_batch": seconds["batch"] / best if "batch" in seconds else None,
        "times_torch": seconds["torch"] / best,
        "wrong": 0,
    }


def _by_index(blocks: Blocks) -> float:
    """Times an assignment by index: of torch on the GPU, or of numpy on the host in a dry run."""
    arena = blocks.arena
    into, from_ = arena.index(blocks.dst_ids), arena.index(blocks.src_ids)
    if arena.dry:
        dst, src = (blocks.views(arena.read(buffer)) for buffer in (blocks.dst, blocks.src))

        def take() -> float:
            started = time.perf_counter()
            dst[into] = src[from_]
            return time.perf_counter() - started

        return median_s(take, takes=1)
    import torch

    words = [
        buffer.owner[: blocks.pool * blocks.block_bytes].view(torch.int64).view(blocks.pool, -1)
        for buffer in (blocks.dst, blocks.src)
    ]

    def timed() -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        words[0][into] = words[1][from_]
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    taken = median_s(timed, takes=3)
    blocks.dst.owner.zero_()
    torch.cuda.synchronize()
    return taken


def run(budget_s: float) -> Outcome:
    """Measures every size for which there is time.

    Raises:
        StepFailedError: A byte is wrong.
    """
    arena, loop = open_arena(), CudaLoop()
    total = DRY_TOTAL_BYTES if arena.dry else TOTAL_BYTES
    pool = int(total * _SLOTS)
    src, dst = arena.empty(pool), arena.empty(pool)
    content = arena.random(pool, 5)
    arena.write(src, content)
    limit_s = median_s(lambda: loop.whole(dst.address, src.address, total, _ROUNDS))
    arena.write(dst, arena.flat(np.zeros(pool, np.uint8)))
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    for block_bytes in BLOCK_BYTES:
        if rows and time.monotonic() - started > budget_s:
            break
        rows.append(row(loop, Blocks(arena, total, block_bytes, src, dst), content, limit_s))
    if len(rows) < len(BLOCK_BYTES):
        raise StepFailedError(f"only {len(rows)} of {len(BLOCK_BYTES)} sizes in {budget_s:g} s")
    return Outcome(
        text=f"{len(rows)} sizes of blocks, {total >> 20} MiB each, device copy at {rate(total, limit_s):.0f} GB/s",
        facts={"total_bytes": total, "limit_gb_s": rate(total, limit_s), "rounds": _ROUNDS},
        rows=rows,
    )
