"""What a reader sees: a line for each step, the table, the floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_check.floors import Floor
from gpu_check.outcome import FAILED, PASSED, SKIPPED, Outcome

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
    ("once GB/s", "once_gb_s", "{:.1f}"),
    ("taken", "taken", "{}"),
    ("× loop", "times_loop", "{:.1f}"),
    ("× batch", "times_batch", "{:.1f}"),
    ("× torch", "times_torch", "{:.1f}"),
    ("× NIXL", "times_nixl", "{:.1f}"),
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
    parts: list[tuple[str, list[dict[str, Any]], Sequence[tuple[str, str, str]]]] = [
        ("paged copies on the GPU", table_rows(steps), _COLUMNS),
        ("host memory and the GPU", steps.get("host", {}).get("rows", []), _HOST_COLUMNS),
        ("planning and posting", steps.get("posting", {}).get("rows", []), _POSTING_COLUMNS),
    ]
    shown = [f"{title}\n{_table(rows, columns)}" for title, rows, columns in parts if rows]
    if parts[0][1]:
        shown[0] += "\n" + "\n".join(notes(steps))
    return "\n\n".join(shown)


def notes(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How the figures of the first table were found, which was not in one way; nothing where there is no table."""
    if not table_rows(steps):
        return []
    speed, nixl = (steps.get(name, {}).get("facts", {}) for name in ("speed", "nixl"))
    found = [
        f"kernel, bulk, one plane and the device's own copy: {_mib(speed)}, {speed.get('rounds')} rounds back to back, "
        "by the GPU's clock",
        "loop, batch, torch: the same bytes and clock, one round; the loop is of `cuMemcpyAsync`, the driver's "
        "call below `cudaMemcpyAsync`, asked from Rust",
        "of the copy, × loop, × batch, × torch: the kernel that a transfer takes, which is said by `taken`",
        "torch: an index assignment, which gathers into a temporary tensor and scatters from there, so each byte is "
        "read and written twice",
    ]
    if nixl:
        found.append(
            f"NIXL and `once`, pdkv's copy beside it: {_mib(nixl)}, one round, by the host's clock, posting and "
            "waiting included"
        )
    return found


def _mib(facts: Mapping[str, Any]) -> str:
    return f"{facts.get('total_bytes', 0) >> 20} MiB"


def floors(judged: Sequence[Floor]) -> str:
    """The floors, one a line."""
    words = {True: "kept", False: "MISSED", None: "not judged"}
    return "\n".join(
        f"{words[floor.kept]:<10} {floor.what}: {_number(floor.found)} "
        f"(at {'most' if floor.most else 'least'} {floor.bound:g})"
        for floor in judged
    )


def good(steps: Mapping[str, Mapping[str, Any]], judged: Sequence[Floor], *, dry: bool) -> bool:
    """Whether no step failed, some passed, none was skipped but for what the machine lacks, and no floor was missed."""
    states = [step["state"] for step in steps.values()]
    unproven = [step for step in steps.values() if step["state"] == SKIPPED and not step.get("absent")]
    proven = FAILED not in states and PASSED in states and (dry or not unproven)
    return proven and all(floor.kept is not False for floor in judged)


def without(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names what was left out: by what the machine lacks, or by the step where the kind of run leaves it out."""
    left = [what for name, step in steps.items() for what in step.get("absent") or _unrun(name, step)]
    return list(dict.fromkeys(left))


def _unrun(name: str, step: Mapping[str, Any]) -> list[str]:
    return [f"the step `{name}`"] if step["state"] == SKIPPED else []


def _number(found: float | None) -> str:
    return "not measured" if found is None else f"{found:.2f}"


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str, str]]) -> str:
    cells = [[title for title, _, _ in columns]]
    for row in rows:
        cells.append(["-" if row.get(key) is None else form.format(row[key]) for _, key, form in columns])
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
