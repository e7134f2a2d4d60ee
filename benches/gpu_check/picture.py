"""The table as a picture: rates over the size of a block, the device's own copy above; by matplotlib, or without."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_check.png import Canvas, Colour

# Key of a row, name, colour; in the order of the legend.
LINES: tuple[tuple[str, str, Colour], ...] = (
    ("limit_gb_s", "device copy", (120, 120, 120)),
    ("kernel_gb_s", "pdkv kernel", (31, 119, 180)),
    ("bulk_gb_s", "pdkv bulk", (23, 190, 207)),
    ("one_plane_gb_s", "pdkv, one plane", (140, 170, 200)),
    ("batch_gb_s", "cuMemcpyBatchAsync", (44, 160, 44)),
    ("torch_gb_s", "torch index", (214, 39, 40)),
    ("nixl_gb_s", "NIXL", (148, 103, 189)),
    ("once_gb_s", "pdkv, timed as NIXL", (90, 20, 120)),
    ("loop_gb_s", "cuMemcpyAsync loop", (255, 127, 14)),
)
_WIDTH, _HEIGHT = 900, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 250, 50, 60


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> str:
    """Writes the picture; gives what drew it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        _plain(rows, title, path)
        return "the standard library"
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, name, colour in LINES:
        points = _points(rows, key)
        if points:
            style = "--" if key == "limit_gb_s" else "o-"
            axes.plot(*zip(*points, strict=True), style, label=name, color=[part / 255 for part in colour])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of a block")
    axes.set_ylabel("GB/s (10^9 bytes)")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path)
    return "matplotlib"


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(float(row["block_bytes"]), float(row[key])) for row in rows if row.get(key)]


def _plain(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    canvas = Canvas(_WIDTH, _HEIGHT)
    canvas.text(_LEFT, 16, title)
    every = [point for key, _, _ in LINES for point in _points(rows, key)]
    if every:
        _curves(canvas, rows, every)
    canvas.save(path)


def _curves(canvas: Canvas, rows: Sequence[Mapping[str, Any]], every: list[tuple[float, float]]) -> None:
    low, high = (pick(math.log2(x) for x, _ in every) for pick in (min, max))
    bottom = math.floor(math.log10(min(y for _, y in every)))
    top = max(math.ceil(math.log10(max(y for _, y in every))), bottom + 1)
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = (math.log2(point[0]) - low) / max(high - low, 1)
        y = (math.log10(point[1]) - bottom) / (top - bottom)
        return _LEFT + x * inner_width, _TOP + (1 - y) * inner_height

    for power in range(bottom, top + 1):
        y = place((2**low, 10.0**power))[1]
        canvas.line((_LEFT, y), (_LEFT + inner_width, y), (225, 225, 225))
        canvas.text(10, round(y) - 5, f"{10.0**power:g}")
    canvas.text(10, _TOP - 24, "GB/s")
    for size in sorted({x for x, _ in every}):
        x = place((size, 10.0**bottom))[0]
        words = f"{size / 1024:g}K" if size < 1 << 20 else f"{size / (1 << 20):g}M"
        canvas.line((x, _HEIGHT - _BOTTOM), (x, _HEIGHT - _BOTTOM + 5), (80, 80, 80))
        canvas.text(round(x) - 4 * len(words), _HEIGHT - _BOTTOM + 12, words)
    canvas.text(_LEFT, _HEIGHT - 24, "bytes of a block")
    for number, (key, name, colour) in enumerate(LINES):
        points = [place(point) for point in _points(rows, key)]
        for start, end in pairwise(points):
            canvas.line(start, end, colour, 2)
        for x, y in points:
            canvas.rectangle(round(x) - 2, round(y) - 2, 6, 6, colour)
        if points:
            y = _TOP + 20 * number
            canvas.rectangle(_WIDTH - _RIGHT + 14, y + 2, 12, 6, colour)
            canvas.text(_WIDTH - _RIGHT + 32, y, name)
