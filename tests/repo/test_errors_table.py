"""One error catalogue: each kind has a row in Rust, a class in Python, a row in the docs, a test that provokes it."""

from __future__ import annotations

import re

import pytest

from repo.errors_table import PAGE, page_with, python_errors, rows, table
from repo.tree import ROOT, crates, rust_tests, under

KINDS = [pytest.param(row, id=row.slug) for row in rows()]


def provoking_tests() -> str:
    """Everything the tests expect to be raised, in one text."""
    python = (path.read_text() for path in under("tests", ".py") if not path.is_relative_to(ROOT / "tests/repo"))
    rust = (rust_tests(path) for crate in crates().values() for path in crate.sources())
    # The catalogue's own tests walk over all kinds and provoke none.
    return "\n".join([*python, *rust])


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


@pytest.mark.parametrize("row", KINDS)
def test_kind_is_provoked_by_a_test(row):
    raised = re.search(rf"raises\(\s*[^)]*\b{row.python}\b", EXPECTED)
    asserted = re.search(rf"\b(?:ErrorKind|Kind)::{row.name}\b", EXPECTED)
    assert raised or asserted, f"no test expects `{row.python}` or `ErrorKind::{row.name}`"
