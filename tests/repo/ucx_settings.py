"""The defaults that pdkv gives UCX, read from their one table in Rust, and the page made from it.

Run `python tests/repo/ucx_settings.py` after a change of the table to write the page's part between the marks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from repo.tree import ROOT

SOURCE = ROOT / "rust/pdkv-ucx/src/settings.rs"
PAGE = ROOT / "docs/guides/ucx.md"
BEGIN, END = "<!-- defaults: written by tests/repo/ucx_settings.py -->\n", "<!-- end of the defaults -->\n"

_TABLE = re.compile(r"^pub const DEFAULTS: [^=]+= &\[\n(.*?)^\];", re.MULTILINE | re.DOTALL)
_ROW = re.compile(
    r'DefaultSetting \{\s*name: "(?P<name>\w+)",\s*value: "(?P<value>[^"]*)",\s*'
    r"since: Version::(?:new\((?P<since>[\d, ]+)\)|OLDEST),\s*hosts: Hosts::(?P<hosts>\w+),\s*"
    r'why: "(?P<why>[^"]*)",?\s*\}'
)
_HOSTS = {"All": "all hosts", "Rdma": "hosts with RDMA", "Efa": "hosts with EFA"}


class Row(NamedTuple):
    """One default."""

    name: str
    value: str
    since: str
    where: str
    why: str


def source() -> str:
    """The text of the table."""
    found = _TABLE.search(SOURCE.read_text())
    assert found, f"{SOURCE} has no table of defaults"
    return found[1]


def rows() -> list[Row]:
    """The rows of the table, in its order."""
    found = []
    for match in _ROW.finditer(source()):
        since = ".".join(match["since"].split(", ")[:2]) if match["since"] else "any"
        where = _HOSTS[match["hosts"]]
        why = re.sub(r"\\\n\s*", "", match["why"])
        found.append(Row(match["name"], match["value"], since, where, why))
    return found


def table() -> str:
    """The table as the page shows it."""
    lines = ["| UCX's setting | value | from UCX | on | why |", "|---|---|---|---|---|"]
    lines += [f"| `{row.name}` | `{row.value}` | {row.since} | {row.where} | {row.why} |" for row in rows()]
    return "\n".join(lines) + "\n"


def page_with(text: str) -> str:
    """The page with its marked part replaced."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    _, mark, tail = rest.partition(END)
    assert mark, f"{PAGE} has lost its marks"
    return head + BEGIN + text + END + tail


if __name__ == "__main__":
    PAGE.write_text(page_with(table()))
