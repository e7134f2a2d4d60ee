"""Step: every kernel, on random work, every byte of the destination and every checksum compared."""

from __future__ import annotations

import time
from collections import Counter
from random import Random
from typing import Any

import numpy as np

from gpu_check.arena import Arena, open_arena
from gpu_check.jobs import GENERATORS, RACES, Job
from gpu_check.outcome import Outcome, StepFailedError
from gpu_check.pattern import random_bytes
from pdkv._core import CudaLoop

_SEED = 20260


def check(loop: Any, arena: Arena, job: Job, seed: int, *, sums: bool, bulk: bool) -> list[str]:
    """Runs one job and compares all of the destination; gives the names of the kernels that ran.

    Raises:
        StepFailedError: A byte or a checksum is wrong; names the job.
    """
    src, dst = arena.empty(job.src_bytes), arena.empty(job.dst_bytes)
    before = arena.random(job.dst_bytes, seed + 1)
    content = arena.random(job.src_bytes, seed)
    arena.write(src, content)
    arena.write(dst, before)
    expected = before.clone() if hasattr(before, "clone") else before.copy()
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
    copy.run(2 if sums else 1)  # twice: sums must not add up over launches
    wrong = arena.wrong(dst, expected)
    if wrong:
        raise StepFailedError(f"{wrong} of {job.dst_bytes} bytes are wrong after {copy.kernels}: seed {seed}, {job}")
    if sums:
        wanted = job.sums(random_bytes(job.src_bytes, seed))
        found = copy.sums
        if found != wanted:
            first = next(page for page in range(job.num_pages) if found[page] != wanted[page])
            raise StepFailedError(f"the checksum of page {first} is wrong after {copy.kernels}: seed {seed}, {job}")
    return list(copy.kernels)


def run(budget_s: float, *, small: bool = False) -> Outcome:
    """Draws jobs until every kernel has had several, and then as long as there is time.

    Args:
        budget_s: How long to go on drawing.
        small: Draw few: for tools under which everything is slow.

    Raises:
        StepFailedError: A kernel is wrong, or one never had a turn.
    """
    arena, loop = open_arena(), CudaLoop()
    ran: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    least = 40 if small else 400
    started, seed = time.monotonic(), _SEED
    while seed - _SEED < least or (_missing(loop, ran) and time.monotonic() - started < budget_s):
        draw = Random(seed)
        job = GENERATORS[seed % len(GENERATORS)](draw)
        ran.update(check(loop, arena, job, seed, sums=draw.random() < 0.5, bulk=draw.random() < 0.5))
        kinds[job.kind] += 1
        seed += 1
        if time.monotonic() - started > budget_s:
            break
    missing = _missing(loop, ran)
    if missing and not small:
        raise StepFailedError(f"kernels that no job chose in {budget_s:g} s: {', '.join(missing)}")
    return Outcome(
        text=f"{sum(kinds.values())} jobs, {len(ran)} kernels, no byte or checksum is wrong (by {arena.name})",
        facts={
            "kernels": dict(sorted(ran.items())),
            "kinds": dict(kinds),
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
        (kernel,) = check(loop, arena, RACES[name], _SEED, sums=True, bulk=bulk)
        if name not in kernel or not kernel.endswith("_sums"):
            raise StepFailedError(f"`{kernel}` ran where one by {name} with checksums was meant")
        ran.append(kernel)
    return Outcome(text=f"{', '.join(ran)}: no byte or checksum is wrong (by {arena.name})", facts={"kernels": ran})


def _missing(loop: Any, ran: Counter[str]) -> list[str]:
    return sorted(set(loop.kernels) - set(ran))
