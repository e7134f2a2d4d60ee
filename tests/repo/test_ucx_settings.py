"""The page about UCX shows the defaults that the code has, all of them and with their reasons."""

from __future__ import annotations

from repo.ucx_settings import PAGE, page_with, rows, source, table


def test_the_table_is_read_whole():
    assert len(rows()) == source().count("DefaultSetting {") > 3
    assert all(len(row.why) > 30 for row in rows())


def test_the_page_is_fresh():
    assert PAGE.read_text() == page_with(table()), "run `python tests/repo/ucx_settings.py`"
