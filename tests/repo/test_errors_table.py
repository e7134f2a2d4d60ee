"""One error catalogue: each kind has a row in Rust, a class in Python, a row in the docs, a test that provokes it."""

from __future__ import annotations

import re

import pytest

from repo.errors_table import PAGE, page_with, python_errors, rows, table
from repo.tree import ROOT, crates, files, name, rust_code, rust_tests, under

KINDS = [pytest.param(row, id=row.slug) for row in rows()]


# Kinds that nothing raises yet, and what brings them. The first use of one makes its test due.
AWAITED: dict[str, str] = {}

# Walks over all kinds and provokes none of them.
CATALOGUE_TEST = ROOT / "tests/python/test_errors.py"


def provoking_tests() -> str:
    """The text of all tests that may provoke an error."""
    python = [path for path in under("tests", ".py") if not path.is_relative_to(ROOT / "tests/repo")]
    rust = [path for crate in crates().values() for path in crate.sources()]
    return "\n".join([*(p.read_text() for p in python if p != CATALOGUE_TEST), *map(rust_tests, rust)])


EXPECTED = provoking_tests()


def test_the_table_is_read_whole():
    source = (ROOT / "rust/pdkv-core/src/error.rs").read_text().partition("error_kinds! {\n")[2].partition("\n}\n")[0]
    assert len(rows()) == source.count(";") > 20


@pytest.mark.parametrize("row", KINDS)
def test_kind_has_a_python_class_that_agrees(row):
    cls = getattr(python_errors(), row.python)
    assert issubclass(cls, python_errors().PdkvError)
    error = cls("x")
    assert (error.kind, error.scope, error.retryable) == (row.slug, row.scope, row.retry != "never")


def test_python_has_no_class_outside_the_table():
    errors = python_errors()
    groups = {"PdkvError", "PeerError", "StaleReferenceError", "ReferenceMismatchError"}
    classes = {name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, Exception)}
    assert classes == {row.python for row in rows()} | groups


def test_docs_show_the_table_as_it_is():
    assert PAGE.read_text() == page_with(table()), "run `python tests/repo/errors_table.py`"


@pytest.mark.parametrize("row", [kind for kind in KINDS if kind.values[0].name not in AWAITED])
def test_kind_is_provoked_by_a_test(row):
    expected = re.search(rf"\bpdkv\.{row.python}\b|raises\([^)]*\b{row.python}\b|\bErrorKind::{row.name}\b", EXPECTED)
    assert expected, f"no test expects `{row.python}` or `ErrorKind::{row.name}`"


def test_awaited_kinds_are_not_raised_yet():
    for kind in AWAITED:
        raising = [name(path) for path in files(".rs") if f"ErrorKind::{kind}" in rust_code(path)]
        assert not raising, f"`{kind}` is raised now: take it off AWAITED and test it"
