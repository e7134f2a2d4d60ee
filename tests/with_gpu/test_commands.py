"""`pdkv bench` and `pdkv doctor` on memory of GPUs, as commands."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pdkv.cli", *arguments], capture_output=True, text=True, timeout=240, check=False
    )


def command(*arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


SMALL = ("--block-bytes", "4KiB", "--total", "256KiB", "--iters", "2", "--format", "json")


@pytest.mark.parametrize("op", ["pull", "push", "read", "write"])
def test_bench_between_processes(op):
    rows = command("bench", "--transport", "cuda", "--op", op, *SMALL)["rows"]
    ours = next(row for row in rows if row["kind"] == "pdkv")
    assert (ours["wrong"], ours["transport"], ours["staged_bytes"]) == (0, "cuda", 0)
    assert next(row for row in rows if row["kind"] == "limit")["op"] == "device copy"


def test_bench_over_what_moves_host_memory():
    done = run("bench", "--transport", "tcp", "--memory", "cuda", *SMALL)
    if done.returncode == 2:
        # A release that does not stage says so of this very transport.
        assert "tcp: device memory of GPU `0`" in done.stderr, done.stderr
        return
    rows = json.loads(done.stdout)["rows"]
    assert [row["kind"] for row in rows] == ["pdkv"], "there is no limit for it"
    assert (rows[0]["wrong"], rows[0]["transport"]) == (0, "tcp")
    assert rows[0]["staged_bytes"] > 0


def test_bench_in_the_layouts_of_llm_engines():
    rows = command(
        *("bench", "--transport", "cuda", "--model", "tiny", "--isl", "128", "--layout", "BLNHC"),
        *("--iters", "1", "--format", "json"),
    )["rows"]
    assert all(row["wrong"] == 0 for row in rows)


def test_doctor_shows_gpus_and_tries_them():
    report = command("doctor", "--format", "json")
    findings = {finding["subject"]: finding for finding in report["findings"]}
    ours = {f"cuda:0{what}" for what in ("", " kernels", " ways", " memory", " copies")}
    assert {"gpu", "cuda:1", "cuda"} | ours <= set(findings)
    assert findings["cuda"]["status"] == "ok", findings["cuda"]
    assert "moved 65536 bytes" in findings["cuda"]["text"]
    assert "PDKV_CUDA_IMAGE" in findings["cuda:0 kernels"]["text"]
    for device in (0, 1):
        assert findings[f"cuda:{device} copies"]["text"].startswith("25 kernels left the right bytes")
    assert findings["cuda:0 ways"]["text"].endswith(
        "inside it the bulk engine never: it was no faster when it was measured"
    )
    devices = report["gpu"]["devices"]
    assert [device["ordinal"] for device in devices] == list(range(len(devices)))
    assert len({device["uuid"] for device in devices}) == len(devices)
    assert next(row for row in report["choices"] if row["between"] == "GPU to GPU")["transport"] == "cuda"
    assert all(row["hint"] for row in report["findings"] if row["status"] != "ok"), report["findings"]


def test_doctor_names_kernels_that_leave_wrong_bytes(monkeypatch):
    # Every kernel of every process: what moves between two is wrong too, and says so.
    monkeypatch.setenv("PDKV_STANDIN_FAIL", "wrong:0:1")
    report = command("doctor", "--format", "json")
    found = next(finding for finding in report["findings"] if finding["subject"] == "cuda:0 copies")
    assert (found["status"], found["hint"] is not None) == ("note", True)
    assert "left a wrong byte (seed " in found["text"]
    assert report["gpu"]["kernel_trials"][0]["good"] is False
