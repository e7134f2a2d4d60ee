"""The benches of vLLM run and their results are whole: a few small requests, no word on how fast."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from with_vllm import settings
from with_vllm.engines import ASK, Engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--setups pdkv --step-setups pdkv --model tiny --requests 2 --rounds 1 --tokens 65 --in-flight 4 --steps 20"


def test_both_measurements_of_a_few_requests(tmp_path, logs):
    output = tmp_path / "found.json"
    command = [sys.executable, ROOT / "benches/vllm_handover.py", *SMALL.split()]
    command += ["--output", output, "--folder", logs]
    # A server whose engine is in one process imports vLLM once less.
    environment = os.environ | settings.IN_PROCESS
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| `pdkv` | **" in done.stdout
    found = json.loads(output.read_text())

    first = found["first_token"]
    assert len(first["alone"]) == 2
    pdkv = first["setups"]["pdkv"]
    assert [set(times) for times in pdkv["times"]] == [{"prefill", "load", "local", "answer", "export"}] * 2
    assert (pdkv["wrong"], pdkv["failed"], pdkv["moved"]["failed"]) == (0, 0, 0)
    # 3 blocks a prompt and then the last of them again, for two prompts and one to warm up. What an engine has counted
    # last may not have reached its metrics yet.
    assert pdkv["moved"]["transfers"] >= 4
    assert set(pdkv["moved"]["paths"]) <= {"cma", "shm", "tcp"}

    steps = found["steps"]["pdkv"]
    assert steps["wrong"] == 0
    for role in ("exporting", "loading"):
        assert 0 < steps[role]["empty"]["median_us"] <= steps[role]["empty"]["p99_us"]
        assert steps[role]["begin"]["median_us"] > 0


def test_clocks_note_each_part_of_a_load_and_of_an_answer_from_the_cache(tmp_path, logs, tiny, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benches")
    timeline = importlib.import_module("vllm_timeline")
    engines, files = {}, {}
    try:
        for role in ("producer", "consumer"):
            files[role] = timeline.notes(tmp_path, role)
            timeline.let_sleep(files[role], sleep=False)
            transfer = settings.transfer("pdkv", f"kv_{role}")
            transfer |= {"kv_connector": "ClockedConnector", "kv_connector_module_path": "vllm_clocked"}
            environment = {timeline.NOTES: files[role]}
            engines[role] = Engine(f"clocked-{role}", logs, tiny, transfer=transfer, environment=environment)
        prompt = list(range(2, 99))
        params = engines["producer"].ask(prompt, params=dict(ASK), max_tokens=1).params
        for name, given in (("load-0-", params), ("cached-0-", None)):
            engines["consumer"].ask(prompt, params=given, request_id=name)
    finally:
        for engine in engines.values():
            engine.close()
    found = [json.loads(text) for text in Path(files["consumer"]).read_text().splitlines()]
    begun = found[0]["at"]
    parts = timeline.cut(begun, 60.0, found, "load-0-")
    assert list(parts) == ["arrived", "carried", "moved", "ended", "scheduled", "computed", "first"]
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(60_000)
    assert list(timeline.cut(begun, 60.0, found, "cached-0-")) == ["arrived", "scheduled", "computed", "first"]
    [moved] = [note for note in found if note["what"] == "moved"]
    assert moved["bytes"] > 0
    assert timeline.report({kind: [] for kind in timeline._KINDS}).startswith("| part, ms | load |")
