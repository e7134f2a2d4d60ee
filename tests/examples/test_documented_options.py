"""Command lines in the documents use options and models that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def help_text():
    def ask(*command):
        return subprocess.run(
            [sys.executable, "-m", "pdkv.cli", *command, "--help"], capture_output=True, text=True, check=True
        ).stdout

    return {"": ask(), "bench": ask("bench")}


def test_documented_options_of_bench_exist(help_text):
    commands = [line for page in PAGES for line in re.findall(r"pdkv bench[^`\n]*", page.read_text())]
    table = re.findall(r"^\| `(.*)` \|", (ROOT / "docs/guides/benchmarking.md").read_text(), re.MULTILINE)
    options = {option for line in [*commands, *table] for option in re.findall(r"(?<!\w)--[a-z][a-z-]*", line)}
    assert len(options) > 15
    assert {option for option in options if option not in help_text["bench"]} == set()


def test_documented_commands_exist(help_text):
    commands = re.findall(r"^\| `pdkv ([a-z]+)`", (ROOT / "docs/reference/cli.md").read_text(), re.MULTILINE)
    assert commands
    assert [command for command in commands if not re.search(rf"^\s+{command}\b", help_text[""], re.MULTILINE)] == []
