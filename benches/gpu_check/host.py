"""Step: host memory to a GPU and back: one kernel over mapped memory against batches of the copy engine, and a loop.

The host's side is a pool of pdkv's, registered with the driver as the `cuda` transport does it.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from gpu_check.arena import open_arena
from gpu_check.outcome import Outcome, StepFailedError
from gpu_check.pattern import random_bytes
from gpu_check.timing import median_s, rate
from pdkv import Engine, PdkvError
from pdkv._core import CudaLoop

BLOCK_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
TOTAL_BYTES, DRY_TOTAL_BYTES = 128 << 20, 1 << 20


def _one(loop: CudaLoop, total: int, block_bytes: int, ends: tuple[int, int], inward: bool) -> dict[str, Any]:  # noqa: FBT001
    """Measures one direction; `ends` are the addresses of the host's memory and of the GPU's."""
    count = total // block_bytes
    draw = Random(block_bytes)
    ids = [draw.sample(range(count), count) for _ in range(2)]
    src, dst = ends if inward else ends[::-1]
    side = (block_bytes, 1, 0)
    copy = loop.job(
        chunk_bytes=block_bytes,
        src=side,
        dst=side,
        axes=[(1, 0, 0), (1, 0, 0)],
        lanes=[(src, dst)],
        num_pages=count,
        src_pages=ids[0],
        dst_pages=ids[1],
        sums=False,
        bulk=False,
    )
    offsets = [np.asarray(table, np.uint64) * np.uint64(block_bytes) for table in ids]
    found: dict[str, Any] = {"block_bytes": block_bytes, "direction": "to the GPU" if inward else "to the host"}
    found["limit_gb_s"] = rate(total, median_s(lambda: loop.whole(dst, src, total, 2), takes=3))
    found["kernel_gb_s"] = rate(total, median_s(lambda: copy.run(2), takes=3))
    for name in ("batch", "loop"):
        try:
            taken = median_s(
                lambda name=name: loop.blocks(dst, src, offsets[1], offsets[0], block_bytes, name, 1), takes=3
            )
            found[f"{name}_gb_s"] = rate(total, taken)
        except PdkvError as error:
            found[f"{name}_missing"] = str(error)
    found["tables"] = ids
    return found


def run(_budget_s: float) -> Outcome:
    """Measures both directions.

    Raises:
        StepFailedError: A byte is wrong.
    """
    arena, loop = open_arena(), CudaLoop()
    total = DRY_TOTAL_BYTES if arena.dry else TOTAL_BYTES
    pool, buffer = Engine.allocate(total, huge_pages=False), arena.empty(total)
    memory = np.frombuffer(pool, np.uint8)
    mapped = loop.access(pool)
    rows = []
    for block_bytes in BLOCK_BYTES:
        for inward in (True, False):
            content = random_bytes(total, block_bytes + inward)
            if inward:
                memory[:] = content
                arena.write(buffer, arena.flat(np.zeros(total, np.uint8)))
            else:
                memory[:] = 0
                arena.write(buffer, arena.flat(content))
            found = _one(loop, total, block_bytes, (mapped, buffer.address), inward)
            source, into = found.pop("tables")
            expected = np.empty_like(content).reshape(-1, block_bytes)
            expected[into] = content.reshape(-1, block_bytes)[source]
            arrived = arena.array(arena.read(buffer)) if inward else memory
            wrong = int(np.count_nonzero(arrived != expected.reshape(-1)))
            if wrong:
                raise StepFailedError(f"{wrong} bytes are wrong {found['direction']} with blocks of {block_bytes}")
            rows.append(found)
    best = {row["direction"]: max(row["kernel_gb_s"] / row["limit_gb_s"] for row in rows) for row in rows}
    return Outcome(
        text="kernel at best " + ", ".join(f"{share:.2f} of the copy engine {way}" for way, share in best.items()),
        facts={"total_bytes": total},
        rows=rows,
    )
