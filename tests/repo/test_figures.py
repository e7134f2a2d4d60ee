"""Published figures: only verified rows, both pages have their marks, and the tables say what the rows say."""

from __future__ import annotations

import importlib.util

import pytest

from repo.tree import ROOT

spec = importlib.util.spec_from_file_location("figures", ROOT / "benches/figures.py")
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)

ROW = {
    "kind": "pdkv",
    "transport": "shm",
    "op": "pull",
    "model": "raw",
    "block_bytes": 4096,
    "num_blocks": 131072,
    "total_bytes": 1 << 29,
    "gb_per_s": 4.5,
    "limit_gb_per_s": 5.0,
    "ratio": 0.9,
    "wrong": 0,
    "staged_bytes": 0,
    "p50_us": 1.0,
    "p99_us": 2.0,
    "plan_us": 3.0,
    "post_us": 4.0,
    "seed": 7,
    "iters": 5,
    "threads": 2,
    "streams": 1,
    "fragmentation": "random",
}
ROWS = [ROW, {**ROW, "block_bytes": 1 << 20, "gb_per_s": 9.0}, {**ROW, "kind": "limit"}]


def test_summary_has_a_line_a_transport_and_a_column_a_size():
    header, _, line = figures.summary(ROWS).splitlines()
    assert header == "| GB/s (of the limit) | 4 KiB | 1 MiB |"
    assert line == "| `shm` pull | 4.5 (0.90) | 9.0 (0.90) |"


def test_details_have_a_line_a_measurement_of_ours():
    assert len(figures.details(ROWS).splitlines()) == 2 + 2


def test_origin_names_commit_settings_and_machine():
    host = {"cpu": "X", "cores": 2, "memory_bytes": 3 << 30, "kernel": "6", "transparent_hugepage": "never"}
    text = figures.origin(host, ROWS, "abc")
    assert all(fact in text for fact in ("`abc`", "seed 7", "5 iterations", "2 copy threads", "X, 2 cores, 3 GiB"))


def test_rows_with_wrong_bytes_are_refused():
    with pytest.raises(SystemExit, match="wrong bytes"):
        figures.summary([{**ROW, "wrong": 1}])


def test_results_without_ours_are_refused():
    with pytest.raises(SystemExit, match="no row"):
        figures.summary([{**ROW, "kind": "limit"}])


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_page_has_its_marks(page):
    text = (ROOT / page).read_text()
    assert "|new|" in figures.replace(text, "|new|\n")
    assert figures.replace(figures.replace(text, "a\n"), "b\n") == figures.replace(text, "b\n")
