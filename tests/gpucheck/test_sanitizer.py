"""The step under compute-sanitizer, with a tool in its place that runs what it is told to."""

from __future__ import annotations

import json
import sys

import pytest
from gpu_check import run, sanitizer
from gpu_check.outcome import FAILED, PASSED, SKIPPED, Outcome, StepFailedError, StepSkippedError

TOOL = """#!{python}
import subprocess, sys
arguments = sys.argv[1:]
at = arguments.index({python!r})
print("========= COMPUTE-SANITIZER", *arguments[:at], flush=True)
code = subprocess.run(arguments[at:]).returncode
print({found!r})
print("========= ERROR SUMMARY: {errors} errors")
sys.exit({code} or code)
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes a tool that ends so, and jobs that say so."""

    def make(jobs, *, code=0, errors=0, found=""):
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(TOOL.format(python=sys.executable, code=code, errors=errors, found=found))
        tool.chmod(0o755)
        (tmp_path / "gpu_check").mkdir()
        (tmp_path / "gpu_check/__init__.py").write_text("")
        (tmp_path / "gpu_check/__main__.py").write_text(jobs)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.delenv("GPU_CHECK_DRY", raising=False)
        return tool

    return make


def saying(state, text):
    said = json.dumps(Outcome(state, text, {"printed": []}).to_json())
    asked = "import os, sys\nprint('asked', *sys.argv[1:], os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'])\n"
    return f"{asked}print({run.MARK!r} + {said!r})"


def test_clean_jobs_pass_and_calls_that_fail_are_no_errors(machine):
    tool = machine(saying(PASSED, "40 jobs"))
    outcome = sanitizer.run(60)
    assert outcome.state == PASSED
    assert outcome.text == "memcheck: ERROR SUMMARY: 0 errors; 40 jobs"
    assert outcome.facts["tool"] == str(tool)


def test_the_tool_is_told_to_report_memory_alone(machine):
    machine(saying(FAILED, "?"), code=97)
    with pytest.raises(StepFailedError) as raised:
        sanitizer.run(60)
    for option in ("--tool memcheck", "--report-api-errors no", "--launch-timeout 0", "--error-exitcode 97"):
        assert option in str(raised.value)
    assert "asked --step kernels-small --step-budget 30.0 1" in str(raised.value)


def test_races_are_looked_for_in_jobs_of_their_own(machine):
    machine(saying(FAILED, "?"), code=97)
    with pytest.raises(StepFailedError) as raised:
        sanitizer.races(60)
    for option in ("--tool racecheck --launch-timeout 0 --error-exitcode 97", "asked --step kernels-races"):
        assert option in str(raised.value)


RACE = "========= Error: Race reported between Write access at pdkv2_copy_{}+0x50 in pdkv.cu:9"


def test_a_race_fails_the_step(machine):
    machine(saying(PASSED, "2 jobs"), code=97, errors=1, found=RACE.format("vectors_16_sums"))
    with pytest.raises(StepFailedError, match="Race reported"):
        sanitizer.races(60)


def test_a_race_of_the_bulk_kernel_is_told_and_decides_nothing(machine):
    machine(saying(PASSED, "2 jobs"), code=97, errors=1, found=RACE.format("bulk_sums"))
    outcome = sanitizer.races(60)
    assert outcome.state == PASSED
    assert "copy_bulk_sums" in outcome.facts["doubted"][0]
    assert "the bulk kernel" in outcome.absent[0]


def test_one_race_in_doubt_excuses_no_other(machine):
    both = "\n".join(RACE.format(name) for name in ("bulk_sums", "vectors_16_sums"))
    machine(saying(PASSED, "2 jobs"), code=97, errors=2, found=both)
    with pytest.raises(StepFailedError, match="vectors_16_sums"):
        sanitizer.races(60)


def test_nor_does_it_excuse_wrong_bytes_or_a_crash(machine):
    tool = machine(saying(FAILED, "3 bytes are wrong"), code=97, errors=1, found=RACE.format("bulk_sums"))
    with pytest.raises(StepFailedError, match="3 bytes are wrong"):
        sanitizer.races(60)
    tool.write_text(tool.read_text().replace("sys.exit(97 or code)", "sys.exit(11)"))
    with pytest.raises(StepFailedError, match="ended with 11"):
        sanitizer.races(60)


def test_jobs_that_get_nowhere_under_it_are_no_success(machine):
    machine("import time; time.sleep(5)")
    with pytest.raises(StepFailedError, match="took longer than 1 s"):
        sanitizer.run(1)


def test_what_it_finds_fails_the_step_with_its_words(machine):
    machine(saying(PASSED, "40 jobs"), code=97, errors=1, found="========= Invalid __global__ write of size 16 bytes")
    with pytest.raises(StepFailedError, match=r"ended with 97.*Invalid __global__ write"):
        sanitizer.run(60)


def test_jobs_that_go_wrong_under_it_are_no_success(machine):
    machine(saying(FAILED, "3 bytes are wrong"))
    with pytest.raises(StepFailedError, match="jobs went wrong: 3 bytes are wrong"):
        sanitizer.run(60)


def test_jobs_that_say_nothing_are_no_success(machine):
    machine("print('Device not supported')")
    with pytest.raises(StepFailedError, match="Device not supported"):
        sanitizer.run(60)


def test_skipped_jobs_are_no_success(machine):
    machine(saying(SKIPPED, "no torch"))
    with pytest.raises(StepFailedError, match="no torch"):
        sanitizer.run(60)


def test_a_missing_tool_is_skipped_and_named(machine, monkeypatch):
    machine(saying(PASSED, "40 jobs"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sanitizer, "_PLACES", ())
    with pytest.raises(StepSkippedError, match="no compute-sanitizer") as raised:
        sanitizer.races(60)
    assert raised.value.absent == ["compute-sanitizer"]
