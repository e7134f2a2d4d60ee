"""The error catalogue of the Rust core, read from its one table, and the documentation page made from it.

Run `python tests/repo/errors_table.py` after a change of the table to write the page's part between the marks.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from repo.tree import ROOT

SOURCE = ROOT / "rust/pdkv-core/src/error.rs"
PAGE = ROOT / "docs/reference/errors.md"
BEGIN, END = "<!-- table of kinds: written by tests/repo/errors_table.py -->\n", "<!-- end of the table -->\n"

_ROW = re.compile(
    r"(?P<doc>(?:^\s*///[^\n]*\n)+)"
    r"^\s*(?P<name>\w+) = (?P<code>\d+), \"(?P<slug>\w+)\", \"(?P<python>\w+)\", (?P<scope>\w+), (?P<retry>\w+);",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Row:
    """One kind of error."""

    name: str
    code: int
    slug: str
    python: str
    scope: str
    retry: str
    doc: str


def rows() -> list[Row]:
    """The rows of the Rust table, in its order."""
    return [
        Row(
            match["name"],
            int(match["code"]),
            match["slug"],
            match["python"],
            match["scope"].lower(),
            match["retry"].lower(),
            " ".join(line.strip().removeprefix("///").strip() for line in match["doc"].strip().splitlines()),
        )
        for match in _ROW.finditer(SOURCE.read_text())
    ]


@cache
def python_errors() -> ModuleType:
    """`pdkv.errors` loaded by itself: it needs no compiled module, and neither does this check."""
    spec = importlib.util.spec_from_file_location("pdkv_errors_alone", ROOT / "python/pdkv/errors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table() -> str:
    """The table as the page shows it."""
    errors = python_errors()
    lines = ["| kind | raised as | kind of | scope | retry | meaning |", "|---|---|---|---|---|---|"]
    for row in rows():
        parents = [base.__name__ for base in getattr(errors, row.python).__bases__ if base is not errors.PdkvError]
        kind_of = ", ".join(f"`{parent}`" for parent in parents) or "`PdkvError`"
        lines.append(f"| `{row.slug}` | `{row.python}` | {kind_of} | {row.scope} | {row.retry} | {row.doc} |")
    return "\n".join(lines) + "\n"


def page_with(text: str) -> str:
    """The page with its marked part replaced."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, mark, tail = rest.partition(END)
    assert mark, f"{PAGE} has lost its marks"
    return head + BEGIN + text + END + tail


if __name__ == "__main__":
    PAGE.write_text(page_with(table()))
