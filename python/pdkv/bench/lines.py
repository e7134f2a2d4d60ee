"""Rows of `--mode pipe` and `--mode lookup`: what was moved or looked up, how fast, beside what. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from pdkv.bench import report
from pdkv.bench.rows import percentile


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a report. GB are 10^9 bytes; times are microseconds; rates are those of the median iteration.

    Attributes:
        kind: `pdkv`; `limit` for the smallest loop that does the same; `peer` for another program that does.
        name: What was measured.
        path: The transport that was taken.
        what: What an iteration moved or looked up.
        items: Tensors or entries in an iteration.
        total_bytes: Bytes moved by an iteration; 0 where nothing moves.
        gb_per_s: Rate in bytes; `None` where nothing moves, or nothing was measured.
        items_per_s: Rate in items; `None` where nothing was measured.
        limit_gb_per_s: Rate of the limit, measured in turn with this line; `None` without one.
        ratio: `gb_per_s / limit_gb_per_s`.
        pdkv_ratio: How many times the rate of this line pdkv's own line has; `None` where there is no rate.
        wrong: Wrong bytes, or wrong answers, over all iterations.
        staged_bytes: Payload bytes copied on the way, per iteration.
        p50_us: Median time of an iteration.
        p99_us: 99th percentile of it (the worst one, below 100 iterations).
        avg_us: Mean time of it.
        iters: Measured iterations.
        threads: Copy threads of each engine.
        streams: TCP streams.
        seed: Draws bytes, tokens and positions.
        versions: What took part.
        foreign_cores: Median load of other processes before the iterations; `None` if it was not watched.
        note: What the path rides on, what this line does differently, or why it has no rate.
    """

    kind: str
    name: str
    path: str
    what: str
    items: int
    total_bytes: int
    gb_per_s: float | None
    items_per_s: float | None
    limit_gb_per_s: float | None
    ratio: float | None
    pdkv_ratio: float | None
    wrong: int
    staged_bytes: int
    p50_us: float
    p99_us: float
    avg_us: float
    iters: int
    threads: int
    streams: int
    seed: int
    versions: dict[str, str]
    foreign_cores: float | None
    note: str

    def to_json(self) -> dict[str, object]:
        """Gives plain values, in the order of the attributes."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Common:
    """What lines that were measured in turn have in common; the fields are those of `Line`."""

    path: str
    what: str
    items: int
    total_bytes: int
    threads: int
    streams: int
    seed: int
    versions: dict[str, str]
    loads: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """The seconds of each iteration of one line. Without any it could not be measured; `note` says why.

    A `path` is named where it is not that of the others.
    """

    kind: str
    name: str
    seconds: Sequence[float]
    wrong: int = 0
    staged_bytes: int = 0
    note: str = ""
    path: str = ""


def make_lines(common: Common, measured: Sequence[Measured]) -> list[Line]:
    """Makes the lines of what was measured in turn; the first limit and the first of pdkv's are what all go by."""
    limit = next((_rate(common, one) for one in measured if one.kind == "limit"), None)
    ours = next((statistics.median(one.seconds) for one in measured if one.kind == "pdkv" and one.seconds), None)
    return [_line(common, one, limit, ours) for one in measured]


def _rate(common: Common, one: Measured) -> float | None:
    if not one.seconds or not common.total_bytes:
        return None
    return common.total_bytes / statistics.median(one.seconds) / 1e9


def _line(common: Common, one: Measured, limit: float | None, ours: float | None) -> Line:
    rate, seconds = _rate(common, one), one.seconds or [0.0]
    middle = statistics.median(seconds)
    return Line(
        kind=one.kind,
        name=one.name,
        path=one.path or common.path,
        what=common.what,
        items=common.items,
        total_bytes=common.total_bytes,
        gb_per_s=_rounded(rate),
        items_per_s=round(common.items / middle, 1) if one.seconds else None,
        limit_gb_per_s=_rounded(limit),
        ratio=None if rate is None or limit is None else round(rate / limit, 3),
        pdkv_ratio=round(middle / ours, 3) if one.seconds and ours else None,
        wrong=one.wrong,
        staged_bytes=one.staged_bytes,
        p50_us=round(middle * 1e6, 2),
        p99_us=round(percentile(seconds, 0.99) * 1e6, 2),
        avg_us=round(statistics.fmean(seconds) * 1e6, 2),
        iters=len(one.seconds),
        threads=common.threads,
        streams=common.streams,
        seed=common.seed,
        versions=common.versions,
        foreign_cores=round(statistics.median(common.loads), 2) if common.loads else None,
        note=one.note,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _cell(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


_COLUMNS: tuple[tuple[str, Callable[[Line], str]], ...] = (
    ("row", lambda line: f"{line.kind} {line.name}"),
    ("path", lambda line: line.path),
    ("what", lambda line: line.what),
    ("B/W (GB/Sec)", lambda line: ("~" if noisy(line) else "") + _cell(line.gb_per_s, 2)),
    ("per second", lambda line: _cell(line.items_per_s, 0 if (line.items_per_s or 0) >= 100 else 2)),
    ("limit", lambda line: _cell(line.limit_gb_per_s, 2)),
    ("ratio", lambda line: _cell(line.ratio, 3)),
    ("pdkv is", lambda line: "-" if line.kind == "pdkv" else _cell(line.pdkv_ratio, 2, "x")),
    ("#wrong", lambda line: str(line.wrong)),
    ("staged", lambda line: str(line.staged_bytes)),
    ("P50 Lat. (us)", lambda line: _cell(line.p50_us if line.iters else None, 1)),
    ("P99 Lat. (us)", lambda line: _cell(line.p99_us if line.iters else None, 1)),
)
_LEFT = 3


def noisy(line: Line) -> bool:
    """Says whether other processes were known to use the cores."""
    return line.foreign_cores is not None and line.foreign_cores > report.NOISE_CORES


def as_text(lines: Sequence[Line]) -> str:
    """Writes an aligned table, and under it what the lines ride on or why one has no rate."""
    cells = [[title for title, _ in _COLUMNS], *([cell(line) for _, cell in _COLUMNS] for line in lines)]
    notes = sorted({f"{line.kind} {line.name}, {line.what}: {line.note}" for line in lines if line.note})
    return "\n".join([report.align(cells, _LEFT), *notes])


def summary(lines: Sequence[Line]) -> str:
    """Writes the line under the table: whether everything was right."""
    wrong = sum(line.wrong for line in lines)
    verdict = "everything checked, nothing wrong" if wrong == 0 else f"{wrong} WRONG"
    # A lookup has neither threads nor streams; what moves bytes in the same run has.
    threads, streams = (max(getattr(line, name) for line in lines) for name in ("threads", "streams"))
    noise = "; ~ other processes used the cores meanwhile" if any(map(noisy, lines)) else ""
    return f"{verdict}; threads {threads}, streams {streams}, seed {lines[0].seed}{noise}"
