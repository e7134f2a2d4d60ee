"""`--suite floors`: every figure pdkv promises to reach, measured, with pass or miss.

The bounds are ratios to limits of the same run, or absolute where the promise is absolute. Planning is
also timed without Python by `cargo bench -p pdkv-core --bench plan`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from pdkv.bench import host, latency, ucx_floors
from pdkv.bench.floor import Floor, checked
from pdkv.bench.latency import Figure, block_case
from pdkv.bench.measure import Bench
from pdkv.bench.rows import Row
from pdkv.bench.side import Toolkit
from pdkv.bench.sizes import format_size
from pdkv.bench.tables import Fragmentation, block_tables, pool_blocks

BLOCK_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
TOTAL = 512 << 20
MILLION = 1_000_000

# transport -> block bytes -> least ratio to the limit. TCP promises nothing at 4 KiB.
RATIOS: dict[str, dict[int, float]] = {
    "shm": {size: 0.7 if size == BLOCK_SIZES[0] else 0.9 for size in BLOCK_SIZES},
    "cma": dict.fromkeys(BLOCK_SIZES, 0.95),
    "tcp": dict.fromkeys(BLOCK_SIZES[1:], 0.9),
}
READ_US = 5.0
PULL_OVER_READ_US = 60.0
SUBMIT_US = 50.0
GIL_PERCENT = 5.0
IDLE_PERCENT = 1.0
PLAN_BLOCKS, PLAN_LAYERS, PLAN_BYTES = 100_000, 80, 8_000_000
PLAN_MS = {"runs:16": 2.0, "random": 10.0}


TITLES = ["floor", "bound", "value", "", "note"]


def steps() -> int:
    """Says how many times `tick` is called, for a progress bar."""
    return sum(map(len, RATIOS.values())) + len(list(ucx_floors.cases(TOTAL, 1, 0)))


def run(bench: Bench, seed: int, threads: int, label: Callable[[str], None]) -> tuple[list[Floor], list[Row]]:
    """Measures every floor; gives them and the throughput rows behind them.

    Raises:
        PdkvError: A transfer failed.
    """
    floors: list[Floor] = []
    rows: list[Row] = []
    tick, bench.tick = bench.tick, lambda: None
    for transport, bounds in RATIOS.items():
        for size, least in bounds.items():
            case = block_case("pull", transport, TOTAL // size, threads, seed, size)
            label(case.label())
            measured = bench.run(case)
            rows += measured
            floors.append(ratio_floor(measured[0], least))
            tick()
    for case in ucx_floors.cases(TOTAL, threads, seed):
        label(case.label())
        found, measured = ucx_floors.judge(bench, case)
        rows += measured
        floors += found
        tick()
    for transport in ("shm", "cma"):
        label(f"latency {transport}")
        floors += latency_floors(
            latency.one_block_read(bench, transport, seed), latency.one_block_pull(bench, transport, seed)
        )
        floors.append(at_most(latency.submit(bench, transport, seed), SUBMIT_US))
        floors.append(at_most(latency.gil_loss(bench, transport, seed), GIL_PERCENT))
    label("idle engine")
    floors.append(at_most(latency.idle_cpu(bench), IDLE_PERCENT))
    label("1,000,000 blocks")
    floors.append(million(bench, seed, threads))
    label("exit codes")
    floors += exit_floors()
    label("planning")
    floors += planning_floors(bench.kit, seed)
    return floors, rows


def ratio_floor(row: Row, least: float) -> Floor:
    """Judges a throughput row."""
    name = f"{row.transport} {row.op} {format_size(row.block_bytes)}"
    note = f"{row.gb_per_s:.2f} of {row.limit_gb_per_s or 0:.2f} GB/s, {row.threads} threads"
    ok = row.ratio is not None and row.ratio >= least and row.wrong == 0
    return Floor(name, f">= {least} of the limit", f"{row.ratio or 0:.3f}", ok, checked(note, row.wrong))


def latency_floors(read: Figure, pull: Figure) -> list[Floor]:
    """Judges one block by read and by pull."""
    over = pull.value - read.value
    return [
        at_most(read, READ_US),
        Floor(
            f"{pull.transport} {pull.name} p50",
            f"<= read + {PULL_OVER_READ_US:g} us",
            f"{pull.value:g} us",
            over <= PULL_OVER_READ_US and pull.wrong == 0,
            checked(f"read + {over:.1f} us, p99 {pull.p99:g} us", pull.wrong),
        ),
    ]


def at_most(figure: Figure, bound: float) -> Floor:
    """Judges a figure that must not exceed a bound."""
    name = f"{figure.transport} {figure.name}".removeprefix("- ")
    note = f"p99 or worst {figure.p99:g} {figure.unit}" if figure.samples > 1 else ""
    ok = figure.value <= bound and figure.wrong == 0
    return Floor(
        name, f"<= {bound:g} {figure.unit}", f"{figure.value:g} {figure.unit}", ok, checked(note, figure.wrong)
    )


def million(bench: Bench, seed: int, threads: int) -> Floor:
    """Pulls 1,000,000 blocks of 4 KiB in one transfer, if the machine has the memory."""
    name, bound = "1,000,000 blocks of 4 KiB in one pull", "works, every byte right"
    case = replace(block_case("pull", "shm", MILLION, threads, seed), slots_factor=1.0)
    needed = case.pool_bytes * 2
    if host.available_bytes() < needed * 1.5:
        return Floor(name, bound, "-", None, f"needs {format_size(int(needed * 1.5))} of free memory")
    once = replace(bench, iters=1, warmup=0, limits=False, tick=lambda: None)
    row = once.run(case)[0]
    return Floor(
        name, bound, f"{row.p50_us / 1000:.0f} ms", row.wrong == 0, checked(f"{row.gb_per_s:.2f} GB/s", row.wrong)
    )


def planning_floors(kit: Toolkit, seed: int, samples: int = 7) -> Iterator[Floor]:
    """Plans 100,000 blocks x 80 layers, block ids given as numpy arrays; no memory is touched."""
    how = {text: Fragmentation.parse(text) for text in PLAN_MS}
    pool = max(pool_blocks(PLAN_BLOCKS, 1.3, fragmentation) for fragmentation in how.values())
    backing = np.empty((PLAN_LAYERS, pool, 1, 16, 2), dtype=np.uint8)
    tensors = {f"layers.{layer}": backing[layer] for layer in range(PLAN_LAYERS)}
    layout = kit.pdkv.resolve_layout(tensors, layout="BHNC", block_tokens=16)
    for text, bound_ms in PLAN_MS.items():
        src, dst = (block_tables(seed, end, 1, PLAN_BLOCKS, pool, how[text])[0] for end in ("src", "dst"))
        spent = []
        for _ in range(samples):
            started = time.perf_counter()
            plan = kit.pdkv.plan(layout, src, layout, dst)
            spent.append((time.perf_counter() - started) * 1e3)
        middle, memory = statistics.median(spent), int(plan.memory_bytes)
        yield Floor(
            f"plan {PLAN_BLOCKS:,} blocks x {PLAN_LAYERS} layers, {text}",
            f"< {bound_ms:g} ms, < {PLAN_BYTES // 10**6} MB",
            f"{middle:.2f} ms",
            middle < bound_ms and memory < PLAN_BYTES,
            f"{memory / 1e6:.2f} MB",
        )


def exit_floors() -> Iterator[Floor]:
    """Lets small processes use each transport, drop their objects in several orders, and end."""
    for transport in ("inproc", "shm", "cma", "tcp"):
        codes = [
            subprocess.run(
                [sys.executable, "-m", "pdkv.bench.drops", transport, order],
                capture_output=True,
                timeout=60,
                check=False,
            ).returncode
            for order in ("engine-first", "peer-first", "never")
        ]
        yield Floor(
            f"{transport} process ends", "exit code 0", ",".join(map(str, codes)), not any(codes), "3 drop orders"
        )
