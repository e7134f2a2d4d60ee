"""Unsafe code grows only in sight: the count of each crate is a tracked number that a change has to touch.

After a deliberate change run `python tests/repo/test_unsafe_counts.py` to write the new numbers.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from repo.tree import ROOT, crates, rust_code

COUNTS = ROOT / "rust/unsafe-counts.toml"
HEADER = "# Uses of the word `unsafe` in the code of each crate (tests included, comments not); see CONTRIBUTING.md.\n"


def counted() -> dict[str, int]:
    """What the sources hold now."""
    return {
        crate.name: sum(len(re.findall(r"\bunsafe\b", rust_code(path))) for path in crate.sources())
        for crate in crates().values()
    }


def test_unsafe_counts_are_the_tracked_ones():
    tracked = tomllib.loads(COUNTS.read_text())
    assert counted() == tracked, "run `python tests/repo/test_unsafe_counts.py` and let the reviewer see the difference"


def write() -> None:
    """Writes the numbers as they are."""
    COUNTS.write_text(HEADER + "".join(f"{name} = {count}\n" for name, count in counted().items()))


if __name__ == "__main__":
    write()
