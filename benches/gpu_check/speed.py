"""Step: the table. Paged copies of one size after another, beside the device's own copy and beside other ways to do it.

Everything in a row is of one run: the same blocks, timed by the device's events; every byte that moved is compared.
As in a cache with layers the blocks lie in planes that share their two tables, which are random, in pools half again as
large. `one plane` is the same copy with a table of all blocks: what it costs to bring that to the GPU is in its time.
What is judged is the kernel that a transfer takes, however fast the other one is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

import numpy as np

from gpu_check.arena import Arena, Buffer, open_arena
from gpu_check.outcome import FAILED, PASSED, Outcome, StepFailedError
from gpu_check.timing import median_s, rate
from pdkv import PdkvError
from pdkv._core import CudaCopy, CudaLoop

BLOCK_BYTES = (2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)
PROMISED = (16 << 10, 4 << 10)
TOTAL_BYTES, DRY_TOTAL_BYTES = 512 << 20, 2 << 20
PLANES = 32  # keys and values of sixteen layers
_SLOTS = 1.5
_OTHERS = ("loop", "batch", "torch")
_ROUNDS = 8  # the host is ahead of the GPU from the second one on


class Blocks:
    """Two pools of blocks, in planes, and two tables that all planes share."""

    def __init__(self, arena: Arena, total: int, block_bytes: int, src: Buffer, dst: Buffer) -> None:
        """Draws the tables."""
        self.arena, self.block_bytes, self.src, self.dst = arena, block_bytes, src, dst
        self.count = total // block_bytes
        self.planes = min(PLANES, self.count)
        each = self.count // self.planes
        self._slots = int(each * _SLOTS)
        self.pool = self.planes * self._slots
        draw = Random(block_bytes)
        self._tables = [draw.sample(range(self._slots), each) for _ in range(2)]
        self.src_ids, self.dst_ids = (
            [plane * self._slots + number for plane in range(self.planes) for number in table] for table in self._tables
        )

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.count * self.block_bytes

    def kernel(self, loop: CudaLoop, *, bulk: bool = False, one_plane: bool = False) -> CudaCopy:
        """Prepares pdkv's copy: by the tables that the planes share, or by one of all blocks."""
        side = (self.block_bytes, 1, 0)
        steps = [0] if one_plane else [plane * self._slots * self.block_bytes for plane in range(self.planes)]
        src_pages, dst_pages = (self.src_ids, self.dst_ids) if one_plane else self._tables
        return loop.job(
            chunk_bytes=self.block_bytes,
            src=side,
            dst=side,
            axes=[(1, 0, 0), (1, 0, 0)],
            lanes=[(self.src.address + step, self.dst.address + step) for step in steps],
            num_pages=len(src_pages),
            src_pages=src_pages,
            dst_pages=dst_pages,
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


def ways(loop: CudaLoop) -> dict[str, Any]:
    """Gives what transfers find measured on this GPU; where that fails, what they do then."""
    try:
        return loop.ways()
    except PdkvError as error:
        return {"bulk_from_bytes": None, "ways_missing": str(error)}


def taken_way(measured: Mapping[str, Any], block_bytes: int) -> str:
    """Says which kernel a transfer within a GPU takes for pieces of this size: `kernel`, or `bulk` for the bulk engine.

    That is the product's word, not this table's: `bulk_from_bytes` is the size from which on its route takes the bulk
    engine, and there is none where it never does.
    """
    bulk_from = measured.get("bulk_from_bytes")
    return "bulk" if bulk_from is not None and block_bytes >= bulk_from else "kernel"


def ratios(seconds: Mapping[str, float], limit_s: float, way: str) -> dict[str, Any]:
    """Compares the way that a transfer takes with the device's own copy and with other ways to copy blocks."""
    others = {f"times_{name}": seconds[name] / seconds[way] if name in seconds else None for name in _OTHERS}
    return {
        "taken": way,
        "fraction": limit_s / seconds[way],
        "fraction_kernel": limit_s / seconds["kernel"],
        "fraction_bulk": limit_s / seconds["bulk"],
        **others,
    }


def row(loop: CudaLoop, blocks: Blocks, content: Any, limit_s: float, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Measures one size; fractions and multiples are of what a transfer takes.

    Raises:
        StepFailedError: A byte is wrong.
    """
    size = {
        "block_bytes": blocks.block_bytes,
        "blocks": blocks.count,
        "planes": blocks.planes,
        "limit_gb_s": rate(blocks.nbytes, limit_s),
    }
    seconds: dict[str, float] = {}
    facts: dict[str, Any] = {}
    wishes: dict[str, dict[str, bool]] = {"kernel": {}, "bulk": {"bulk": True}, "one_plane": {"one_plane": True}}
    for name, wish in wishes.items():
        copy = blocks.kernel(loop, **wish)
        seconds[name] = median_s(partial(copy.run, _ROUNDS))
        blocks.verify(content, f"{copy.kernels}")
        facts[f"{name}_entry"], facts[f"{name}_post_us"] = copy.kernels[0], copy.post_us
    into, since = blocks.offsets(blocks.dst_ids), blocks.offsets(blocks.src_ids)
    for name in ("loop", "batch"):
        try:
            copies = partial(
                loop.blocks, blocks.dst.address, blocks.src.address, into, since, blocks.block_bytes, name, 1
            )
            seconds[name] = median_s(copies, takes=3)
        except PdkvError as error:
            facts[f"{name}_missing"] = str(error)
            continue
        blocks.verify(content, name)
    seconds["torch"] = _by_index(blocks)
    rates = {f"{name}_gb_s": rate(blocks.nbytes, one) for name, one in seconds.items()}
    way = taken_way(measured, blocks.block_bytes)
    return {**size, **rates, **facts, **ratios(seconds, limit_s, way), "wrong": 0}


def _by_index(blocks: Blocks) -> float:
    """Times an assignment by index: of torch on the GPU, or of numpy on the host in a dry run.

    It is two passes: the blocks are gathered into a temporary tensor, and scattered from there.
    """
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

    seconds = median_s(timed, takes=3)
    blocks.dst.owner.zero_()
    torch.cuda.synchronize()
    return seconds


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
    measured = ways(loop)
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    # The sizes of which something is promised come first, should there be no time for all.
    for block_bytes in sorted(BLOCK_BYTES, key=lambda size: (size not in PROMISED, -size)):
        if rows and time.monotonic() - started > budget_s:
            break
        rows.append(row(loop, Blocks(arena, total, block_bytes, src, dst), content, limit_s, measured))
    rows.sort(key=lambda row: row["block_bytes"])
    text = f"{len(rows)} sizes of blocks, {total >> 20} MiB each, device copy at {rate(total, limit_s):.0f} GB/s"
    whole = len(rows) == len(BLOCK_BYTES)
    return Outcome(
        PASSED if whole else FAILED,  # what there is of the table is kept
        text=text if whole else f"only {len(rows)} of {len(BLOCK_BYTES)} sizes in {budget_s:g} s: {text}",
        facts={"total_bytes": total, "limit_gb_s": rate(total, limit_s), "rounds": _ROUNDS, **measured},
        rows=rows,
        absent=[] if all("batch_gb_s" in row for row in rows) else ["cuMemcpyBatchAsync"],
    )
