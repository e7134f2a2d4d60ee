"""Draws rows as a picture: rate over block size, the limits dashed; bars if there is one size. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdkv.bench.rows import Row
from pdkv.bench.sizes import format_size
from pdkv.errors import ConfigError, UnsupportedError

SUFFIXES = (".png", ".svg", ".pdf")
_RATE = "GB/s (10\N{SUPERSCRIPT NINE} bytes)"


def check(path: Path) -> None:
    """Refuses, before anything is measured, a plot that could not be drawn.

    Raises:
        ConfigError: The file's ending is unknown.
        UnsupportedError: matplotlib is missing.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"`{path}` does not end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("`--plot` needs matplotlib", hint="pip install 'pdkv[bench]'") from error


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture.

    Raises:
        UnsupportedError: matplotlib is missing.
        ConfigError: The file's ending is unknown or it cannot be written.
    """
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines = _lines(rows)
    if all(len(line.points) == 1 for line in lines):
        _bars(axes, lines)
    else:
        _curves(axes, lines)
        figure.legend(loc="outside right upper", frameon=False)
    axes.set_title(_title(rows), loc="left", fontsize="medium")
    axes.set_axisbelow(True)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write `{path}`: {error}") from error


@dataclass
class _Line:
    """The rates of one way over block sizes; a limit has the colour of the first way it limits."""

    label: str
    colour: str
    is_limit: bool
    points: dict[int, float] = field(default_factory=dict)


def _lines(rows: Sequence[Row]) -> list[_Line]:
    """Sorts the rows into lines, so that no two rows share a point unless nothing tells them apart."""
    shown = [what for what in ("model", "threads", "burst") if len({getattr(row, what) for row in rows}) > 1]
    lines: dict[tuple[object, ...], _Line] = {}
    colours: dict[tuple[object, ...], str] = {}
    count = 0
    for row in rows:
        place = (row.transport, *(getattr(row, what) for what in shown))
        key = (row.kind, row.op, *place)
        if key not in lines:
            is_limit = row.kind == "limit"
            if is_limit:
                colour = colours.get(place, "grey")
            else:
                colour, count = f"C{count}", count + 1
                colours.setdefault(place, colour)
            texts = [row.model if what == "model" else f"{what} {getattr(row, what)}" for what in shown]
            lines[key] = _Line(", ".join([f"{row.kind} {row.op}", row.transport, *texts]), colour, is_limit)
        lines[key].points[row.block_bytes] = row.gb_per_s
    return list(lines.values())


def _curves(axes: Any, lines: Sequence[_Line]) -> None:
    for line in lines:
        sizes = sorted(line.points)
        axes.plot(
            sizes,
            [line.points[size] for size in sizes],
            color=line.colour,
            linestyle="--" if line.is_limit else "-",
            marker="x" if line.is_limit else "o",
            label=line.label,
        )
    ticks = sorted({size for line in lines for size in line.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [format_size(size) for size in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("block size in one layer")
    axes.set_ylabel(_RATE)
    axes.grid(visible=True, alpha=0.3)


def _bars(axes: Any, lines: Sequence[_Line]) -> None:
    """Draws one bar per line where there is no second block size to draw a line to."""
    places = range(len(lines))
    rates = [rate for line in lines for rate in line.points.values()]
    bars = axes.barh(
        places,
        rates,
        height=0.7,
        color=["none" if line.is_limit else line.colour for line in lines],
        edgecolor=[line.colour for line in lines],
        hatch=["///" if line.is_limit else "" for line in lines],
    )
    axes.bar_label(bars, fmt="%.2f", padding=4)
    sizes = [format_size(size) for line in lines for size in line.points]
    axes.set_yticks(places, [f"{line.label}, {size}" for line, size in zip(lines, sizes, strict=True)])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.set_xlabel(_RATE)
    axes.grid(visible=True, axis="x", alpha=0.3)


def _title(rows: Sequence[Row]) -> str:
    """Names what all rows share."""
    parts = [
        ", ".join(dict.fromkeys(values)) for values in zip(*((r.model, r.fragmentation) for r in rows), strict=True)
    ]
    return f"pdkv bench: {parts[0]}; blocks {parts[1]}; every byte checked"
