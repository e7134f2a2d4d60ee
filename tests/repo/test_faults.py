"""The table of known faults names tests that exist, and leaves no promise out."""

from __future__ import annotations

import re

from repo.tree import ROOT, files, name

PAGE = ROOT / "docs/reference/faults.md"
TEST = re.compile(r"`([\w/]+\.(?:py|rs))::(\w+)`")


def missing(page: str) -> list[str]:
    """The tests that a page names and that aren't there."""
    sources = files(".py", ".rs")
    absent = []
    for file, test in TEST.findall(page):
        places = [path for path in sources if name(path).endswith("/" + file)]
        if not any(re.search(rf"\b(?:def|fn) {test}\(", path.read_text()) for path in places):
            absent.append(f"{file}::{test}")
    return absent


def rows(page: str) -> list[list[str]]:
    """The cells of every row of every table."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith(("| promise", "| class"))
    ]


def test_every_named_test_exists():
    assert missing(PAGE.read_text()) == []


def test_the_check_sees_what_is_missing():
    assert missing("`test_faults.py::test_every_named_test_exists` `test_faults.py::test_nothing`") == [
        "test_faults.py::test_nothing"
    ]


def test_every_promise_and_every_class_is_proven_or_says_with_what_it_comes():
    found = rows(PAGE.read_text())
    assert [row[0].split()[0] for row in found[:9]] == [f"P{number}" for number in range(1, 10)]
    assert len(found) > 40
    for row in found:
        assert TEST.search(row[2]) or re.search(r"\bcomes? with ", row[1]), row[0]
