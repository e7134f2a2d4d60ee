"""Step: the same paged copy by NIXL, where it can be imported: two agents in this process, a descriptor a block.

NIXL is timed by the host's clock, from posting until it says that it is done. So is pdkv's copy beside it, of the same
bytes: the table's other figures are of the GPU's clock, and of more bytes.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from gpu_check.arena import is_dry, open_arena
from gpu_check.outcome import Outcome, StepFailedError, StepSkippedError
from gpu_check.speed import Blocks, taken_way, ways
from gpu_check.timing import median_s, rate
from pdkv._core import CudaCopy, CudaLoop

BLOCK_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
TOTAL_BYTES = 64 << 20
_SLOTS = 1.5


class _Agents:
    """A reader and an owner, both of this process."""

    def __init__(self, module: Any, src: Any, dst: Any) -> None:
        self._owner, self._reader = module.nixl_agent("owner"), module.nixl_agent("reader")
        self._owner.register_memory(src)
        self._reader.register_memory(dst)
        self._name = self._reader.add_remote_agent(self._owner.get_agent_metadata())

    def handle(self, blocks: Blocks) -> Any:
        """Prepares a read of all blocks."""
        ends = []
        for buffer, ids in ((blocks.dst, blocks.dst_ids), (blocks.src, blocks.src_ids)):
            spans = [(buffer.address + number * blocks.block_bytes, blocks.block_bytes, 0) for number in ids]
            ends.append(self._reader.get_xfer_descs(spans, "VRAM"))
        return self._reader.initialize_xfer("READ", ends[0], ends[1], self._name)

    def read(self, handle: Any) -> float:
        """Reads once; gives the seconds."""
        started = time.perf_counter()
        state = self._reader.transfer(handle)
        while state == "PROC":
            state = self._reader.check_xfer_state(handle)
        if state != "DONE":
            raise StepFailedError(f"NIXL says `{state}`")
        return time.perf_counter() - started


def _once(copy: CudaCopy) -> float:
    """Posts pdkv's copy once and waits for it; gives the seconds of the host's clock."""
    started = time.perf_counter()
    copy.run(1)
    return time.perf_counter() - started


def run(budget_s: float) -> Outcome:
    """Measures it.

    Raises:
        StepSkippedError: There is no NIXL.
        StepFailedError: A byte is wrong.
    """
    if is_dry():
        raise StepSkippedError("NIXL takes torch's tensors on a GPU, and numpy is in torch's place here")
    try:
        from nixl import _api as module
    except ImportError as error:
        raise StepSkippedError(f"NIXL can't be imported: {error}", "NIXL") from error
    arena, loop = open_arena(), CudaLoop()
    pool = int(TOTAL_BYTES * _SLOTS)
    src, dst = arena.empty(pool), arena.empty(pool)
    content = arena.random(pool, 6)
    arena.write(src, content)
    agents = _Agents(module, src.owner, dst.owner)
    measured, rows, started = ways(loop), [], time.monotonic()
    for block_bytes in BLOCK_BYTES[::-1]:
        blocks = Blocks(arena, TOTAL_BYTES, block_bytes, src, dst)
        handle = agents.handle(blocks)
        taken = median_s(partial(agents.read, handle), takes=3)
        blocks.verify(content, "NIXL")
        copy = blocks.kernel(loop, bulk=taken_way(measured, block_bytes) == "bulk")
        once = median_s(partial(_once, copy), takes=3)
        blocks.verify(content, f"{copy.kernels}")
        rows.append(
            {
                "block_bytes": block_bytes,
                "nixl_gb_s": rate(blocks.nbytes, taken),
                "once_gb_s": rate(blocks.nbytes, once),
                "times_nixl": taken / once,
            }
        )
        if time.monotonic() - started > budget_s / 2:
            break
    return Outcome(text=f"{len(rows)} sizes of blocks by NIXL", facts={"total_bytes": TOTAL_BYTES}, rows=rows)
