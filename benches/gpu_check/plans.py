"""Step: plans between layouts as engines have them, run by the kernels, compared with an assignment of views."""

from __future__ import annotations

import time
from random import Random

import pdkv
from gpu_check import caches
from gpu_check.arena import Arena, open_arena
from gpu_check.outcome import Outcome, StepFailedError
from pdkv._core import CudaLoop, cache_regions

_SEED = 7_000
_LEAST = 60


def check(loop: CudaLoop, arena: Arena, seed: int) -> list[str]:
    """Draws two caches and tables, plans, copies and compares; gives the names of the kernels that ran.

    Raises:
        StepFailedError: A byte or a checksum is wrong; names the plan.
    """
    draw = Random(seed)
    src, dst = caches.pair(draw)
    src_ids, dst_ids = caches.tables(draw, src, dst)
    ends = []
    for geometry, salt in ((src, 0), (dst, 1)):
        buffer = arena.empty(geometry.nbytes)
        flat = arena.random(geometry.nbytes, 2 * seed + salt)
        arena.write(buffer, flat)
        tensors = geometry.tensors(arena, buffer)
        layout = pdkv.resolve_layout(tensors, layout="BHNC", block_tokens=geometry.tokens)
        bases = [address for address, _ in cache_regions(tensors, layout="BHNC", block_tokens=geometry.tokens)]
        ends.append((buffer, flat, layout, bases))
    (_, src_flat, src_layout, src_bases), (buffer, dst_flat, dst_layout, dst_bases) = ends
    expected = caches.moved(arena, src, src_flat, src_ids, dst, dst_flat, dst_ids)
    plan = pdkv.plan(src_layout, src_ids, dst_layout, dst_ids)
    copy = loop.plan(plan, src_bases, dst_bases, sums=draw.random() < 0.3, bulk=draw.random() < 0.5)
    copy.run(1)
    wrong = arena.wrong(buffer, expected)
    if wrong:
        raise StepFailedError(f"{wrong} bytes are wrong after {copy.kernels}: seed {seed}, {src} to {dst}")
    read, placed = copy.sums
    if read != placed:
        raise StepFailedError(f"checksums differ by {copy.kernels}, and no byte: seed {seed}, {src} to {dst}")
    return list(copy.kernels)


def run(budget_s: float) -> Outcome:
    """Checks plans until enough were, or the time is over.

    Raises:
        StepFailedError: One is wrong.
    """
    arena, loop = open_arena(), CudaLoop()
    started, count = time.monotonic(), 0
    kernels: set[str] = set()
    while count < _LEAST and (count == 0 or time.monotonic() - started < budget_s):
        kernels.update(check(loop, arena, _SEED + count))
        count += 1
    return Outcome(
        text=f"{count} plans between {len(caches.ORDERS)} orders of axes, no byte is wrong (by {arena.name})",
        facts={"plans": count, "kernels": sorted(kernels), "first_seed": _SEED},
    )
