import builtins
import csv
import io
import json
import sys
from dataclasses import replace

import pytest

from bench.test_cases import CASE
from pdkv.bench import plot, report, rows
from pdkv.bench.side import Timing
from pdkv.errors import ConfigError, UnsupportedError


def timing(seconds, plan=1.0):
    return Timing(seconds, plan, 2.0, seconds * 9e5, 3.0, 0, 80, "shm")


def some_rows(wrong=0):
    timings = [timing(s) for s in (0.003, 0.001, 0.002, 0.004, 0.1)]
    limit = rows.Beside("limit", "scattered copy", [0.002] * 5)
    return rows.make_rows(CASE, timings, wrong, [limit], {"pdkv": "1"}, [0.1, 0.3, 0.2])


def test_a_row_is_the_median_iteration():
    ours, limit = some_rows()
    assert (ours.p50_us, ours.p99_us, ours.avg_us) == (3000.0, 100_000.0, 22_000.0)
    assert ours.gb_per_s == pytest.approx(CASE.total_bytes / 0.003 / 1e9, abs=1e-3)
    assert ours.ratio == pytest.approx(2 / 3, abs=1e-3)
    assert (limit.ratio, limit.plan_us, limit.post_us) == (1.0, 0.0, 0.0)
    assert ours.foreign_cores == 0.2


@pytest.mark.parametrize(
    ("values", "share", "value"),
    [([5], 0.99, 5), (list(range(1, 101)), 0.99, 99), ([3, 1, 2], 0.5, 2), ([1, 2], 0.0, 1)],
)
def test_percentiles_are_measured_values(values, share, value):
    assert rows.percentile(values, share) == value


def test_json_has_rows_and_host():
    told = json.loads(report.as_json(some_rows(), {"cpu": "x"}))
    assert set(told) == {"rows", "host"}
    assert [row["kind"] for row in told["rows"]] == ["pdkv", "limit"]


def test_csv_reads_back():
    table = list(csv.DictReader(io.StringIO(report.as_csv(some_rows()))))
    assert table[0]["wrong"] == "0"
    assert table[0]["versions"] == "pdkv=1"
    assert float(table[0]["ratio"]) < 1
    assert list(table[0]) == list(some_rows()[0].to_json())


def test_text_has_nixlbench_columns_and_ours():
    head, rule, *lines = report.as_text(some_rows()).splitlines()
    for title in (
        "Block Size (B)", "Batch Size", "B/W (GB/Sec)", "Avg Lat. (us)", "Avg Prep (us)", "P99 Prep (us)",
        "Avg Post (us)", "P99 Post (us)", "Avg Tx (us)", "P99 Tx (us)", "#wrong", "staged", "path", "ratio",
    ):  # fmt: skip
        assert title in head
    assert set(rule) == {"-"}
    assert lines[0].startswith("pdkv pull")
    assert lines[1].startswith("limit scattered copy")


def test_the_summary_does_not_hide_wrong_bytes():
    assert "none wrong" in report.summary(some_rows())
    assert "7 WRONG BYTES" in report.summary(some_rows(wrong=7))


def test_noise_is_marked():
    loud = [replace(row, foreign_cores=1.0) for row in some_rows()]
    assert "~" in report.as_text(loud)
    assert "other processes" in report.summary(loud)
    assert "~" not in report.as_text(some_rows()) + report.summary(some_rows())


def test_the_title_names_what_varies_once():
    line = report.title(some_rows())
    assert "models tiny;" in line
    assert "threads 2;" in line


def test_narrow_terminals_keep_what_matters():
    titles = [column.title for column in report.fitting(some_rows(), 80)]
    assert {"row", "path", "B/W (GB/Sec)", "ratio", "#wrong", "staged"} <= set(titles)
    assert "P99 Tx (us)" not in titles
    assert report.fitting(some_rows(), 500) == list(report.COLUMNS)


def test_a_plain_table_fits_a_terminal_and_says_what_it_left_out():
    assert max(map(len, report.as_text(some_rows(), 100).splitlines())) <= 100
    assert "some columns did not fit" in report.as_text(some_rows(), 100)
    assert report.as_text(some_rows(), 500) == report.as_text(some_rows())


def test_what_differs_between_rows_has_a_column():
    both = [*some_rows(), *(replace(row, threads=7) for row in some_rows())]
    head, _, *lines = report.as_text(both).splitlines()
    assert "threads" in head
    assert "burst" not in head
    assert lines[0] != lines[2]
    assert "threads" not in report.as_text(some_rows()).splitlines()[0]


def test_the_rich_table_shows_everything_that_fits(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    report.print_rich(some_rows(wrong=3))
    shown = capsys.readouterr().out
    assert "scattered copy" in shown
    assert "#wrong" in shown


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    many = [replace(row, block_bytes=size) for row in some_rows() for size in (4096, 65536)]
    path = tmp_path / f"rates{suffix}"
    plot.draw(many, path)
    assert path.read_bytes().startswith((b"\x89PNG", b"<?xml"))


def test_a_plot_tells_apart_what_the_rows_differ_in():
    both = [*some_rows(), *(replace(row, threads=7) for row in some_rows())]
    lines = plot._lines(both)
    assert [line.label for line in lines] == [
        f"{kind}, shm, threads {threads}" for threads in (2, 7) for kind in ("pdkv pull", "limit scattered copy")
    ]
    assert lines[0].colour == lines[1].colour != lines[2].colour == lines[3].colour


def test_one_block_size_is_drawn_as_bars(tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw(some_rows(), tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000


def test_an_unknown_ending_is_refused_before_measuring(tmp_path):
    with pytest.raises(ConfigError, match="does not end in"):
        plot.check(tmp_path / "rates.bmp")


def test_a_missing_matplotlib_is_named(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match="needs matplotlib") as caught:
        plot.draw(some_rows(), tmp_path / "rates.png")
    assert "pip install" in caught.value.hint
