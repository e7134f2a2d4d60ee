"""Writes the figures of README.md and docs/performance.md from results of `pdkv bench --format json`.

`make figures` measures and calls this. The text between the marks is replaced; everything around it stays.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures: written by `make figures` -->\n", "<!-- end of the figures -->\n"

Row = dict[str, Any]

# Heading, and how a row fills it.
DETAILS = {
    "transport": "`{transport}`",
    "op": "{op}",
    "block": "{block}",
    "blocks": "{num_blocks}",
    "GB/s": "{gb_per_s:.2f}",
    "limit GB/s": "{limit_gb_per_s:.2f}",
    "ratio": "{ratio:.2f}",
    "p50 µs": "{p50_us:.0f}",
    "p99 µs": "{p99_us:.0f}",
    "plan µs": "{plan_us:.0f}",
    "post µs": "{post_us:.0f}",
    "staged": "{staged_bytes}",
    "wrong": "{wrong}",
}


def bytes_text(count: int) -> str:
    """A size as people write it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} B"


def line(cells: Iterable[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |\n"


def transfers(rows: Iterable[Row]) -> list[Row]:
    """The rows of pdkv itself, by transport and block size."""
    ours = [row for row in rows if row["kind"] == "pdkv"]
    if not ours:
        raise SystemExit("no row of kind `pdkv` in the results")
    if bad := [row for row in ours if row["wrong"]]:
        raise SystemExit(f"rows with wrong bytes are not published: {bad}")
    return sorted(ours, key=lambda row: (row["transport"], row["op"], row["block_bytes"]))


def summary(rows: Iterable[Row]) -> str:
    """The short table: a line for each transport, a column for each block size."""
    ours = transfers(rows)
    sizes = sorted({row["block_bytes"] for row in ours})
    text = line(["GB/s (of the limit)", *map(bytes_text, sizes)]) + line(["---"] * (len(sizes) + 1))
    for transport, op in dict.fromkeys((row["transport"], row["op"]) for row in ours):
        cells = {
            row["block_bytes"]: f"{row['gb_per_s']:.1f} ({row['ratio']:.2f})"
            for row in ours
            if (row["transport"], row["op"]) == (transport, op)
        }
        text += line([f"`{transport}` {op}", *(cells.get(size, "") for size in sizes)])
    return text


def details(rows: Iterable[Row]) -> str:
    """The long table: a line for each measurement."""
    text = line(DETAILS) + line(["---"] * len(DETAILS))
    for row in transfers(rows):
        block = bytes_text(row["block_bytes"])
        text += line(cell.format(**row, block=block) for cell in DETAILS.values())
    return text


def origin(host: Row, rows: Iterable[Row], commit: str) -> str:
    """Where the figures come from: commit, settings, machine."""
    ours = transfers(rows)

    def each(field: str) -> str:
        return ", ".join(str(value) for value in sorted({row[field] for row in ours}))

    return (
        f"Commit `{commit}`, seed {each('seed')}, {each('iters')} iterations, {each('threads')} copy threads, "
        f"{each('streams')} streams; {each('fragmentation')} block tables. {host['cpu']}, {host['cores']} cores, "
        f"{host['memory_bytes'] / 2**30:.0f} GiB, Linux {host['kernel']}, transparent huge pages "
        f"`{host['transparent_hugepage']}`.\n"
    )


def replace(page: str, text: str) -> str:
    """The page with the marked part replaced."""
    head, mark, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (mark and end):
        raise SystemExit("the page has lost its marks")
    return head + BEGIN + text + END + tail


def main() -> None:
    """Reads results, writes both pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="files written by `pdkv bench --format json --output`")
    results = [json.loads(path.read_text()) for path in parser.parse_args().results]
    rows = [row for result in results for row in result["rows"]]
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    source = origin(results[0]["host"], rows, commit)
    readme, performance = ROOT / "README.md", ROOT / "docs/performance.md"
    readme.write_text(replace(readme.read_text(), f"{summary(rows)}\n{source}"))
    performance.write_text(replace(performance.read_text(), f"{summary(rows)}\n{details(rows)}\n{source}"))


if __name__ == "__main__":
    main()
