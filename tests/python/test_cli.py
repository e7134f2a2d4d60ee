"""The `pdkv` command, as a user runs it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest

import pdkv
from pdkv import cli, explain


def pdkv_command(*arguments):
    return subprocess.run([sys.executable, "-m", "pdkv.cli", *arguments], capture_output=True, text=True, timeout=240)


def test_version():
    done = pdkv_command("version")
    assert (done.returncode, done.stdout.strip()) == (0, pdkv.build_info())


def test_version_as_an_option():
    done = pdkv_command("--version")
    assert (done.returncode, done.stdout.strip()) == (0, pdkv.build_info())


def test_explain_says_that_something_else_answers(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        closer = threading.Thread(target=lambda: other.accept()[0].close())
        closer.start()
        assert cli.main(["explain", "--connect", f"127.0.0.1:{other.getsockname()[1]}"]) == 2
        closer.join()
    assert "hint: is it a pdkv engine that listens there?" in capsys.readouterr().err


def test_help_lists_the_commands():
    done = pdkv_command("--help")
    assert done.returncode == 0
    assert all(f" {command} " in done.stdout for command in ("bench", "explain", "doctor", "version"))


@pytest.mark.parametrize("arguments", [(), ("nothing",), ("explain", "--layers", "many")])
def test_usage_errors(arguments):
    done = pdkv_command(*arguments)
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_explain_a_plan(capsys):
    assert cli.main(["explain", "--src", "LBHNC", "--dst", "BLNHC", "--blocks", "40", "--runs", "4"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("arguments", [("--src", "LBHN"), ("--layers", "0"), ("--connect", "127.0.0.1:1")])
def test_errors_go_to_stderr_with_their_hint(arguments, capsys):
    assert cli.main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")


def test_explain_counts_what_merges():
    shape = explain.Shape(layers=2, heads=1, tokens=16, content=64, item_bytes=2)
    layout = explain._layout(shape, "LBHNC", 100)
    assert layout.block_bytes == 2 * 16 * 64 * 2
    assert explain.transfer(shape, "LBHNC", "LBHNC", 8, 4) != explain.transfer(shape, "LBHNC", "LBHNC", 8, 1)


def test_explain_links():
    with pdkv.Engine("there") as engine:
        text = explain.links(engine.address)
    assert text.startswith("there at ")
    assert "tcp: usable" in text
    said = dict(line.split(": ", 1) for line in text.splitlines()[1:])
    assert said["tcp"].endswith("; memory of GPUs: staged")
    assert said["inproc"].endswith("; memory of GPUs: refused")
    assert said["cuda"] == "not usable, neither side is device memory"


def test_doctor():
    done = pdkv_command("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok    tcp: moved 65536 bytes" in done.stdout
    for subject in ("pdkv", "ptrace", "huge pages", "shm", "cma"):
        assert f" {subject}: " in done.stdout
