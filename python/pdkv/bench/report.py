"""Shows rows: a table for people, CSV or JSON for programs. Knows nothing of how they were measured."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdkv.bench.rows import Row
from pdkv.bench.sizes import format_size

NOISE_CORES = 0.25
LEFT = ("row", "path", "model")  # columns of words; numbers stand to the right


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table; those with a higher `drop` go first when the terminal is narrow."""

    title: str
    cell: Callable[[Row], str]
    drop: int = 0


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _limited(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


# The titles from `Block Size (B)` to `P99 Tx (us)` are nixlbench's.
COLUMNS: tuple[Column, ...] = (
    Column("row", lambda row: f"{row.kind} {row.op}"),
    Column("path", lambda row: row.transport),
    Column("model", lambda row: row.model, drop=1),
    Column("Block Size (B)", lambda row: str(row.block_bytes)),
    Column("Batch Size", lambda row: str(row.num_blocks), drop=2),
    Column("B/W (GB/Sec)", lambda row: f"{'~' if noisy(row) else ''}{row.gb_per_s:.2f}"),
    Column("limit", lambda row: _limited(row.limit_gb_per_s, 2), drop=1),
    Column("ratio", lambda row: _limited(row.ratio, 3)),
    Column("#wrong", lambda row: str(row.wrong)),
    Column("staged", lambda row: str(row.staged_bytes)),
    Column("Avg Lat. (us)", lambda row: _us(row.avg_us), drop=1),
    Column("Avg Prep (us)", lambda row: _us(row.plan_us), drop=3),
    Column("P99 Prep (us)", lambda row: _us(row.plan_p99_us), drop=5),
    Column("Avg Post (us)", lambda row: _us(row.post_us), drop=3),
    Column("P99 Post (us)", lambda row: _us(row.post_p99_us), drop=5),
    Column("Avg Tx (us)", lambda row: _us(row.tx_us), drop=4),
    Column("P99 Tx (us)", lambda row: _us(row.tx_p99_us), drop=5),
)

# Shown behind the model if the rows differ in it.
VARIED: tuple[Column, ...] = (
    Column("threads", lambda row: str(row.threads)),
    Column("burst", lambda row: str(row.burst)),
)
_PLACE_OF_VARIED = 3
# Shown behind the ratio if other programs took part: how many times their rate pdkv reached.
AGAINST_PEERS = Column("pdkv is", lambda row: "-" if row.kind == "pdkv" else f"{_limited(row.pdkv_ratio, 2)}x")
_PLACE_OF_PEERS = [column.title for column in COLUMNS].index("ratio") + 1


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """Gives the columns that tell these rows apart, and all the others."""
    varied = [column for column in VARIED if len({column.cell(row) for row in rows}) > 1]
    peers = [AGAINST_PEERS] if any(row.kind == "peer" for row in rows) else []
    first, middle, last = (
        COLUMNS[:_PLACE_OF_VARIED],
        COLUMNS[_PLACE_OF_VARIED:_PLACE_OF_PEERS],
        COLUMNS[_PLACE_OF_PEERS:],
    )
    return [*first, *varied, *middle, *peers, *last]


def noisy(row: Row) -> bool:
    """Says whether other processes were known to use the cores."""
    return row.foreign_cores is not None and row.foreign_cores > NOISE_CORES


def title(rows: Sequence[Row]) -> str:
    """Writes the line above the table: what the rows have in common."""
    texts = {
        "models": [row.model for row in rows],
        "fragmentation": [row.fragmentation for row in rows],
        "layout": [row.layout for row in rows],
        "threads": [str(row.threads) for row in rows],
        "streams": [str(row.streams) for row in rows],
        "burst": [str(row.burst) for row in rows],
        "seed": [str(row.seed) for row in rows],
    }
    parts = [f"{name} {', '.join(dict.fromkeys(values))}" for name, values in texts.items()]
    return f"pdkv bench: {'; '.join(parts)}"


class Plain(Protocol):
    """A row of any kind: a dataclass whose `to_json` gives its fields in their order."""

    def to_json(self) -> dict[str, object]:
        """Gives plain values."""


def as_json(rows: Sequence[Plain], host: dict[str, object], **more: object) -> str:
    """Writes `{"rows": [...], "host": {...}}`."""
    return json.dumps({"rows": [row.to_json() for row in rows], "host": host, **more}, indent=1)


def as_csv(rows: Sequence[Plain]) -> str:
    """Writes one line per row, headed by the names of the rows' fields."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for i, row in enumerate(rows):
        plain = row.to_json()
        if i == 0:
            writer.writerow(plain)
        writer.writerow([_csv_cell(value) for value in plain.values()])
    return text.getvalue().rstrip("\n")


def _csv_cell(value: object) -> object:
    if isinstance(value, dict):
        return " ".join(f"{key}={one}" for key, one in value.items())
    return "" if value is None else value


def as_text(rows: Sequence[Row], width: int | None = None) -> str:
    """Writes an aligned table: every column for files and pipes, those that fit into `width` for a terminal."""
    columns = columns_of(rows) if width is None else fitting(rows, width, titles_wrap=False)
    lines = [[column.title for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    left = sum(column.title in LEFT for column in columns)
    return "\n".join([align(lines, left), *omission(rows, columns), *notes(rows)])


def notes(rows: Sequence[Row]) -> list[str]:
    """Says what the rows ride on where that is not plain, what differs in them, and why one has no rate."""
    said = {
        f"{row.kind} {row.op}, {format_size(row.block_bytes)}: {row.note}"
        for row in rows
        if row.note and (row.kind != "pdkv" or row.transport == "ucx")
    }
    return sorted(said)


def omission(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """Says that columns were left out, if they were."""
    if len(columns) == len(columns_of(rows)):
        return []
    return ["some columns did not fit; `--format csv` and `--format json` have all"]


def align(lines: Sequence[Sequence[str]], left: int) -> str:
    """Aligns cells under their titles, the first `left` columns to the left, and rules off the titles."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    return "\n".join(line.rstrip() for line in text)


def summary(rows: Sequence[Row]) -> str:
    """Writes the line under the table: what was moved, and whether every byte was right."""
    ours = [row for row in rows if row.kind == "pdkv"]
    moved = sum(row.total_bytes * row.iters for row in ours)
    wrong = sum(row.wrong for row in rows)
    verdict = "every byte checked, none wrong" if wrong == 0 else f"{wrong} WRONG BYTES"
    staged = sum(row.staged_bytes for row in ours)
    iterations = sum(row.iters for row in ours)
    noise = "; ~ other processes used the cores meanwhile" if any(map(noisy, rows)) else ""
    return f"{format_size(moved)} moved in {iterations} iterations; {verdict}; {staged} bytes staged{noise}"


def rich_installed() -> bool:
    """Says whether a rich table can be shown; without it the plain one is."""
    return importlib.util.find_spec("rich") is not None


def print_rich(rows: Sequence[Row]) -> None:
    """Prints the table for a terminal, leaving out columns that do not fit (CSV and JSON have them all).

    Raises:
        ImportError: rich is not installed.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table: Any = Table()
    columns = fitting(rows, console.width)
    for column in columns:
        left = column.title in LEFT
        table.add_column(column.title, justify="left" if left else "right", width=_width(column, rows))
    for row in rows:
        style = "bold red" if row.wrong else "dim" if row.kind == "limit" else None
        table.add_row(*(column.cell(row) for column in columns), style=style)
    console.print(table)
    for line in (*omission(rows, columns), *notes(rows)):
        console.print(line, style="dim")


def fitting(rows: Sequence[Row], width: int | None = None, *, titles_wrap: bool = True) -> list[Column]:
    """Chooses the columns that fit a width; titles may wrap at spaces, cells may not."""
    width = width or shutil.get_terminal_size().columns
    chosen = columns_of(rows)
    for drop in range(5, 0, -1):
        taken = (_width(column, rows) if titles_wrap else _full_width(column, rows) for column in chosen)
        if sum(one + 3 for one in taken) < width:
            break
        chosen = [column for column in chosen if column.drop != drop]
    return chosen


def _width(column: Column, rows: Sequence[Row]) -> int:
    return max(len(text) for text in (*column.title.split(), *(column.cell(row) for row in rows)))


def _full_width(column: Column, rows: Sequence[Row]) -> int:
    return max(len(column.title), _width(column, rows))
