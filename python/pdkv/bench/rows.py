"""What one measured case amounts to: a `Row`, and the arithmetic that makes it. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pdkv.bench.cases import Case
from pdkv.bench.side import Timing


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report. GB are 10^9 bytes; times are microseconds; rates are those of the median iteration.

    Attributes:
        kind: `pdkv`; `limit` for the smallest loop that does the same; `peer` for another program that does.
        transport: The path that was taken.
        op: `pull`, `push`, `read`, `write`; for the others what they are.
        model: The preset, `custom` or `raw`.
        block_bytes: Bytes of one page: one block in one layer.
        num_blocks: Pages moved per iteration.
        total_bytes: Bytes moved per iteration.
        gb_per_s: Rate of the median iteration.
        limit_gb_per_s: Rate of the limit, measured in turn with this row; `None` without one.
        ratio: `gb_per_s / limit_gb_per_s`.
        wrong: Wrong bytes over all iterations, plus bytes written that were not asked for.
        staged_bytes: Payload bytes copied anywhere but from page to page, per iteration.
        p50_us: Median time of an iteration: from the call until completion was seen.
        p99_us: 99th percentile of it (the worst one, below 100 iterations).
        plan_us: Mean time spent planning, over a burst together.
        post_us: Mean time of the submitting calls, over a burst together.
        seed: Draws the block tables and the bytes.
        versions: What took part.
        requested: The transport asked for: `auto`, or the required one.
        avg_us: Mean time of an iteration.
        plan_p99_us: 99th percentile of planning.
        post_p99_us: 99th percentile of submitting.
        tx_us: Mean time from the grant until the last byte was placed, of the slowest transfer of a burst.
        tx_p99_us: 99th percentile of it.
        runs: Contiguous copies after merging neighbours, per iteration.
        iters: Measured iterations.
        threads: Copy threads.
        streams: TCP streams.
        fragmentation: How scattered the tables were.
        layout: Order of the axes in memory.
        memory: Who allocated the pages.
        block_tokens: Tokens per block.
        burst: Transfers in flight at once.
        foreign_cores: Median load of other processes before the iterations; `None` if it was not watched.
        pdkv_ratio: How many times the rate of this row pdkv's own row has; `None` where there is no rate.
        note: What the path rides on, what this row does differently, or why it has no rate.
    """

    kind: str
    transport: str
    op: str
    model: str
    block_bytes: int
    num_blocks: int
    total_bytes: int
    gb_per_s: float
    limit_gb_per_s: float | None
    ratio: float | None
    wrong: int
    staged_bytes: int
    p50_us: float
    p99_us: float
    plan_us: float
    post_us: float
    seed: int
    versions: dict[str, str]
    requested: str
    avg_us: float
    plan_p99_us: float
    post_p99_us: float
    tx_us: float
    tx_p99_us: float
    runs: int
    iters: int
    threads: int
    streams: int
    fragmentation: str
    layout: str
    memory: str
    block_tokens: int
    burst: int
    foreign_cores: float | None
    pdkv_ratio: float | None
    note: str

    def to_json(self) -> dict[str, object]:
        """Gives plain values, in the order of the attributes."""
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float:
    """Gives the smallest value that at least `share` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def rate(total_bytes: int, seconds: Sequence[float]) -> float:
    """Gives GB/s of the median."""
    return total_bytes / statistics.median(seconds) / 1e9


@dataclass(frozen=True, slots=True)
class Beside:
    """What was measured in turn with pdkv: a limit or a peer. Without `seconds` it could not be; `note` says why."""

    kind: str
    name: str
    seconds: Sequence[float]
    wrong: int = 0
    note: str = ""


def make_rows(
    case: Case,
    timings: Sequence[Timing],
    wrong: int,
    beside: Sequence[Beside],
    versions: dict[str, str],
    loads: Sequence[float],
) -> list[Row]:
    """Makes the row of a case and those of what was measured beside it; the first limit is the limit of all."""
    limit = next((rate(case.total_bytes, one.seconds) for one in beside if one.kind == "limit" and one.seconds), None)
    reached = rate(case.total_bytes, [timing.seconds for timing in timings])
    common = _Common(case, limit, reached, versions, round(statistics.median(loads), 2) if loads else None)
    rows = [_row(common, "pdkv", case.op, timings, wrong, timings[-1].detail)]
    for one in beside:
        path, pages = timings[0].path, case.pages
        bare = [Timing(s, 0.0, 0.0, s * 1e6, 0.0, 0, pages, path) for s in one.seconds]
        rows.append(_row(common, one.kind, one.name, bare, one.wrong, one.note, path))
    return rows


@dataclass(frozen=True, slots=True)
class _Common:
    """What the rows of one case share."""

    case: Case
    limit: float | None
    pdkv: float
    versions: dict[str, str]
    foreign: float | None


def _row(common: _Common, kind: str, op: str, timings: Sequence[Timing], wrong: int, note: str, path: str = "") -> Row:
    case = common.case
    seconds = [timing.seconds for timing in timings]
    reached = rate(case.total_bytes, seconds) if seconds else 0.0
    plan, post, wire = ([getattr(t, what) for t in timings] or [0.0] for what in ("plan_us", "post_us", "wire_us"))
    times = seconds or [0.0]
    return Row(
        kind=kind,
        transport=",".join(sorted({timing.path for timing in timings})) or path,
        op=op,
        model=case.geometry.name,
        block_bytes=case.page_bytes,
        num_blocks=case.pages,
        total_bytes=case.total_bytes,
        gb_per_s=round(reached, 3),
        limit_gb_per_s=None if common.limit is None else round(common.limit, 3),
        ratio=None if common.limit is None or not seconds else round(reached / common.limit, 3),
        wrong=wrong,
        staged_bytes=max((timing.staged_bytes for timing in timings), default=0),
        p50_us=round(statistics.median(times) * 1e6, 1),
        p99_us=round(percentile(times, 0.99) * 1e6, 1),
        plan_us=round(statistics.fmean(plan), 1),
        post_us=round(statistics.fmean(post), 1),
        seed=case.seed,
        versions=common.versions,
        requested=case.transport,
        avg_us=round(statistics.fmean(times) * 1e6, 1),
        plan_p99_us=round(percentile(plan, 0.99), 1),
        post_p99_us=round(percentile(post, 0.99), 1),
        tx_us=round(statistics.fmean(wire), 1),
        tx_p99_us=round(percentile(wire, 0.99), 1),
        runs=timings[-1].runs if timings else 0,
        iters=len(timings),
        threads=case.threads,
        streams=case.streams,
        fragmentation=str(case.fragmentation),
        layout=case.layout,
        memory=case.where,
        block_tokens=case.block_tokens,
        burst=case.requests,
        foreign_cores=common.foreign,
        pdkv_ratio=round(common.pdkv / reached, 3) if reached else None,
        note=note,
    )
