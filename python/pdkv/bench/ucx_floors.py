"""What the `ucx` transport promises, measured over kernel copies, which every machine has.

pdkv against the plain loop over the same spans, and the loop over one single block against `ucx_perftest`,
which moves one block too: the one says what pdkv adds to UCX, the other that UCX is driven as its own
benchmark drives it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from pdkv.bench.cases import Case
from pdkv.bench.floor import Floor, checked
from pdkv.bench.latency import block_case
from pdkv.bench.measure import Bench
from pdkv.bench.presets import PRESETS
from pdkv.bench.rows import Row
from pdkv.bench.sizes import format_size
from pdkv.bench.ucx import Ucx
from pdkv.bench.ucx_loop import loop_name
from pdkv.errors import CapacityError, UnsupportedError

SIZES = (64 << 10, 256 << 10, 1 << 20)
LEAST = 0.9
_CACHE_BLOCKS = 4096
_USE = Ucx(tls="posix,cma", one_sided="any")


def cases(total: int, threads: int, seed: int) -> Iterator[Case]:
    """Makes the cases: plain blocks of each size both ways, then a whole paged cache of `llama-3.1-8b`."""
    for op, size in itertools.product(("write", "read"), SIZES):
        yield replace(block_case(op, "ucx", total // size, threads, seed, size), ucx=_USE)
    yield replace(
        block_case("push", "ucx", _CACHE_BLOCKS, threads, seed),
        geometry=PRESETS["llama-3.1-8b"],
        block_tokens=16,
        slots_factor=1.0,
        ucx=_USE,
    )


def judge(bench: Bench, case: Case) -> tuple[list[Floor], list[Row]]:
    """Measures a case; gives its floors and its rows. Without UCX or the memory the floor says so.

    Raises:
        PdkvError: A transfer failed.
    """
    name = f"ucx {case.op} {format_size(case.page_bytes)} x {case.pages:,}"
    bound = f">= {LEAST} of the {loop_name(case.active)}"
    try:
        rows = bench.run(case)
    except (CapacityError, UnsupportedError) as error:
        return [Floor(name, bound, "-", None, str(error).splitlines()[0])], []
    row = rows[0]
    note = f"{row.gb_per_s:.2f} of {row.limit_gb_per_s or 0:.2f} GB/s, {row.note}"
    ok = row.ratio is not None and row.ratio >= LEAST and row.wrong == 0
    return [Floor(name, bound, f"{row.ratio or 0:.3f}", ok, checked(note, row.wrong)), against_perftest(rows)], rows


def against_perftest(rows: list[Row]) -> Floor:
    """Judges the loop over one block by what `ucx_perftest` reaches with one block."""
    name = f"ucx one block of {format_size(rows[0].block_bytes)}, again and again"
    bound = f">= {LEAST} of ucx_perftest"
    one = next((row for row in rows if row.kind == "limit" and row.op.endswith("one block") and row.gb_per_s), None)
    program = next((row for row in rows if row.op.startswith("ucx_perftest")), None)
    if one is None or program is None or not program.gb_per_s:
        return Floor(name, bound, "-", None, program.note if program else "no row of it")
    share = one.gb_per_s / program.gb_per_s
    note = f"{one.gb_per_s:.2f} of {program.gb_per_s:.2f} GB/s, {program.note}"
    return Floor(name, bound, f"{share:.3f}", share >= LEAST and one.wrong == 0, checked(note, one.wrong))
