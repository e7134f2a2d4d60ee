"""What a reader sees: a line for each step, the table, the floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_check.floors import Floor
from gpu_check.outcome import FAILED, PASSED, Outcome

_COLUMNS = (
    ("block", "block_bytes", "{}"),
    ("kernel GB/s", "kernel_gb_s", "{:.1f}"),
    ("bulk GB/s", "bulk_gb_s", "{:.1f}"),
    ("one plane GB/s", "one_plane_gb_s", "{:.1f}"),
    ("of the copy", "fraction", "{:.2f}"),
    ("loop GB/s", "loop_gb_s", "{:.1f}"),
    ("batch GB/s", "batch_gb_s", "{:.1f}"),
    ("torch GB/s", "torch_gb_s", "{:.1f}"),
    ("NIXL GB/s", "nixl_gb_s", "{:.1f}"),
    ("× loop", "times_loop", "{:.1f}"),
    ("× batch", "times_batch", "{:.1f}"),
    ("× torch", "times_torch", "{:.1f}"),
    ("wrong", "wrong", "{}"),
)
_HOST_COLUMNS = (
    ("block", "block_bytes", "{}"),
    ("direction", "direction", "{}"),
    ("kernel GB/s", "kernel_gb_s", "{:.1f}"),
    ("few blocks GB/s", "few_gb_s", "{:.1f}"),
    ("bulk GB/s", "bulk_gb_s", "{:.1f}"),
    ("batch GB/s", "batch_gb_s", "{:.1f}"),
    ("loop GB/s", "loop_gb_s", "{:.1f}"),
    ("limit GB/s", "limit_gb_s", "{:.1f}"),
)
_POSTING_COLUMNS = (
    ("layers", "layers", "{}"),
    ("cost µs", "cost_us", "{:.1f}"),
    ("plan µs", "plan_us", "{:.1f}"),
    ("post µs", "post_us", "{:.1f}"),
    ("queue µs", "queue_us", "{:.1f}"),
)


def line(name: str, outcome: Outcome, seconds: float) -> str:
    """One step in a line; of a failed one also what it printed."""
    text = f"{outcome.state:<8} {name} ({seconds:.1f} s): {outcome.text}"
    return "\n".join([text, *(f"         | {row}" for row in outcome.facts.get("printed", []))])


def table_rows(steps: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table of speeds, NIXL's figures among them."""
    nixl = {row["block_bytes"]: row for row in steps.get("nixl", {}).get("rows", [])}
    return [{**row, **nixl.get(row["block_bytes"], {})} for row in steps.get("speed", {}).get("rows", [])]


def tables(steps: Mapping[str, Mapping[str, Any]]) -> str:
    """All tables that there are figures for, as text."""
    parts = [("paged copies on the GPU", table_rows(steps), _COLUMNS)]
    parts += [("host memory and the GPU", steps.get("host", {}).get("rows", []), _HOST_COLUMNS)]
    parts += [("planning and posting", steps.get("posting", {}).get("rows", []), _POSTING_COLUMNS)]
    return "\n\n".join(f"{title}\n{_table(rows, columns)}" for title, rows, columns in parts if rows)


def floors(judged: Sequence[Floor]) -> str:
    """The floors, one a line."""
    words = {True: "kept", False: "MISSED", None: "not judged"}
    return "\n".join(
        f"{words[floor.kept]:<10} {floor.what}: {_number(floor.found)} "
        f"(at {'most' if floor.most else 'least'} {floor.bound:g})"
        for floor in judged
    )


def good(steps: Mapping[str, Mapping[str, Any]], judged: Sequence[Floor]) -> bool:
    """Whether no step failed, some passed, and no floor was missed."""
    states = [step["state"] for step in steps.values()]
    return FAILED not in states and PASSED in states and all(floor.kept is not False for floor in judged)


def _number(found: float | None) -> str:
    return "not measured" if found is None else f"{found:.2f}"


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str, str]]) -> str:
    cells = [[title for title, _, _ in columns]]
    for row in rows:
        cells.append(["-" if row.get(key) is None else form.format(row[key]) for _, key, form in columns])
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
