"""Step: every kernel, on random work, every byte of the destination and every checksum compared."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from gpu_check.arena import Arena, Buffer, open_arena
from gpu_check.caches import copied
from gpu_check.jobs import GENERATORS, RACES, Job
from gpu_check.outcome import Outcome, StepFailedError
from gpu_check.pattern import random_bytes
from pdkv._core import CudaCopy, CudaLoop

_SEED = 20260
# For one flag: no copy here takes a thousandth of it.
_PATIENCE_S = 20.0
# So many jobs are run once more, by their flag.
_FLAGGED = 4


def check(loop: CudaLoop, arena: Arena, job: Job, seed: int, *, sums: bool, bulk: bool) -> list[str]:
    """Runs one job and compares all of the destination; gives the names of the kernels that ran.

    Raises:
        StepFailedError: A byte or a checksum is wrong; names the job.
    """
    ready = _prepare(loop, arena, job, seed, sums=sums, bulk=bulk)
    ready.copy.run(2 if sums else 1)  # twice: sums must not add up over launches
    _judge(arena.wrong(ready.dst, ready.expected), ready.copy, job, seed, sums=sums)
    return ready.copy.kernels


def check_flag(loop: CudaLoop, beside: CudaLoop, arena: Arena, job: Job, seed: int, *, sums: bool, bulk: bool) -> None:
    """Runs one job, waits for its flag and for nothing else, and compares what is there by then.

    Args:
        loop: Whose stream copies.
        beside: Whose stream reads the destination: one that waits for no other.
        arena: Where buffers come from.
        job: What is copied.
        seed: What the bytes follow from.
        sums: Whether checksums are to be there too: then the stream raises the flag, and not the kernel.
        bulk: Whether the bulk engine may do it.

    Raises:
        StepFailedError: The flag did not come or is another, or a byte or a checksum was not there before it.
    """
    ready = _prepare(loop, arena, job, seed, sums=sums, bulk=bulk)
    there = np.empty(job.dst_bytes, np.uint8)
    with arena.going():
        wanted, found = ready.copy.tell(_PATIENCE_S)
        beside.copy(there.ctypes.data, ready.dst.address, there.nbytes)
        beside.wait()
    if found != wanted:
        loop.wait()  # the memory is the copy's until then
        names = ready.copy.kernels
        raise StepFailedError(f"the flag is {found} instead of {wanted} after {names}: seed {seed}, {job}")
    wrong = int(np.count_nonzero(there != arena.array(ready.expected)))
    _judge(wrong, ready.copy, job, seed, sums=sums, when="when the flag had come ")


@dataclass
class _Ready:
    """A copy that can be run, and what holds its memory."""

    copy: CudaCopy
    src: Buffer
    dst: Buffer
    expected: Any


def _prepare(loop: CudaLoop, arena: Arena, job: Job, seed: int, *, sums: bool, bulk: bool) -> _Ready:
    src, dst = arena.empty(job.src_bytes), arena.empty(job.dst_bytes)
    before = arena.random(job.dst_bytes, seed + 1)
    content = arena.random(job.src_bytes, seed)
    arena.write(src, content)
    arena.write(dst, before)
    expected = copied(before)
    expected[arena.index(job.places(1))] = content[arena.index(job.places(0))]
    copy = loop.job(
        chunk_bytes=job.chunk_bytes,
        src=job.src.plain(),
        dst=job.dst.plain(),
        axes=[job.outer.plain(), job.inner.plain()],
        lanes=[(src.address + one, dst.address + other) for one, other in job.lanes],
        num_pages=job.num_pages,
        src_pages=job.src_pages,
        dst_pages=job.dst_pages,
        sums=sums,
        bulk=bulk,
    )
    return _Ready(copy, src, dst, expected)


def _judge(wrong: int, copy: CudaCopy, job: Job, seed: int, *, sums: bool, when: str = "") -> None:
    if wrong:
        raise StepFailedError(
            f"{wrong} of {job.dst_bytes} bytes are wrong {when}after {copy.kernels}: seed {seed}, {job}"
        )
    if sums:
        wanted = job.sums(random_bytes(job.src_bytes, seed))
        for where, found in zip(("read", "placed"), copy.sums, strict=True):
            if found != wanted:
                first = next(page for page in range(job.num_pages) if found[page] != wanted[page])
                text = (
                    f"the checksum of page {first} as {where} is wrong {when}after {copy.kernels}: seed {seed}, {job}"
                )
                raise StepFailedError(text)


def run(budget_s: float, *, small: bool = False) -> Outcome:
    """Draws jobs until every kernel has had several, and then as long as there is time.

    Args:
        budget_s: How long to go on drawing.
        small: Draw few: for tools under which everything is slow.

    Raises:
        StepFailedError: A kernel is wrong, or one never had a turn.
    """
    arena, loop, beside = open_arena(), CudaLoop(), CudaLoop()
    ran: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    least, flags = 40 if small else 400, 0
    started, seed = time.monotonic(), _SEED
    while seed - _SEED < least or (_missing(loop, ran) and time.monotonic() - started < budget_s):
        draw = Random(seed)
        job = GENERATORS[seed % len(GENERATORS)](draw)
        sums, bulk = draw.random() < 0.5, draw.random() < 0.5
        ran.update(check(loop, arena, job, seed, sums=sums, bulk=bulk))
        if seed % _FLAGGED == 0:
            check_flag(loop, beside, arena, job, seed, sums=sums, bulk=bulk)
            flags += 1
        kinds[job.kind] += 1
        seed += 1
        if time.monotonic() - started > budget_s:
            break
    missing = _missing(loop, ran)
    if missing and not small:
        raise StepFailedError(f"kernels that no job chose in {budget_s:g} s: {', '.join(missing)}")
    return Outcome(
        text=f"{sum(kinds.values())} jobs, {len(ran)} kernels, no byte or checksum is wrong (by {arena.name}); "
        f"{flags} flags came after all bytes",
        facts={
            "kernels": dict(sorted(ran.items())),
            "kinds": dict(kinds),
            "flags": flags,
            "first_seed": _SEED,
            "numpy": np.__version__,
        },
    )


def run_small(budget_s: float) -> Outcome:
    """The same with few jobs, for tools under which everything is slow."""
    return run(budget_s, small=True)


def run_races(_budget_s: float) -> Outcome:
    """One job by vectors and, where there is a bulk engine, one by it, both with checksums: for a tool that is slower.

    Raises:
        StepFailedError: A kernel is wrong, or another one ran.
    """
    arena, loop = open_arena(), CudaLoop()
    wanted = {"vectors": False, "bulk": True} if any("bulk" in name for name in loop.kernels) else {"vectors": False}
    ran: list[str] = []
    for name, bulk in wanted.items():
        kernel, *_ = check(loop, arena, RACES[name], _SEED, sums=True, bulk=bulk)
        if name not in kernel or not kernel.endswith("_sums"):
            raise StepFailedError(f"`{kernel}` ran where one by {name} with checksums was meant")
        ran.append(kernel)
    return Outcome(text=f"{', '.join(ran)}: no byte or checksum is wrong (by {arena.name})", facts={"kernels": ran})


def _missing(loop: CudaLoop, ran: Counter[str]) -> list[str]:
    return sorted(set(loop.kernels) - set(ran))
