"""Draws rows as a picture: rate over block size, one line per path, the limits dashed. Needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from pdkv.bench.rows import Row
from pdkv.bench.sizes import format_size
from pdkv.errors import ConfigError, UnsupportedError

SUFFIXES = (".png", ".svg", ".pdf")


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

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: dict[tuple[str, str, str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        lines[(row.transport, row.model, row.op, row.kind)][row.block_bytes] = row.gb_per_s
    colours = {key: f"C{i}" for i, key in enumerate(dict.fromkeys(key[:2] for key in lines))}
    for (transport, model, op, kind), points in lines.items():
        sizes = sorted(points)
        axes.plot(
            sizes,
            [points[size] for size in sizes],
            color=colours[transport, model],
            linestyle="--" if kind == "limit" else "-",
            marker="x" if kind == "limit" else "o",
            label=f"{kind} {op} ({transport}, {model})",
        )
    ticks = sorted({row.block_bytes for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [format_size(size) for size in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of a block in one layer")
    axes.set_ylabel("GB/s (10^9 bytes)")
    axes.set_title("pdkv bench: scattered blocks, every byte checked")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write `{path}`: {error}") from error
