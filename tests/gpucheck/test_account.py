"""What is said of a run without a GPU: which steps ran and on what, and that none passed for another reason."""

from __future__ import annotations

from types import SimpleNamespace

from gpu_check import account, protocols
from gpu_check.outcome import PASSED, SKIPPED


def step(state, text, **facts):
    return {"state": state, "text": text, "facts": facts}


NUMPY = {
    "plans": step(PASSED, "60 plans"),
    "capture": step(SKIPPED, "numpy has no captures"),
    "ucx": step(PASSED, "12 transfers"),
    "nixl": step(SKIPPED, "numpy is not NIXL's"),
}
TORCH = {
    "plans": step(PASSED, "10 plans"),
    "capture": step(PASSED, "3 engines"),
    "ucx": step(SKIPPED, "no adapter"),
    "nixl": step(SKIPPED, "can't be imported"),
}


def test_each_step_is_told_with_what_it_ran_on():
    lines = account.table(NUMPY, TORCH, {"capture": "a list of calls"})
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["plans", PASSED, PASSED],
        ["capture", SKIPPED, PASSED],
        ["ucx", PASSED, SKIPPED],
        ["nixl", SKIPPED, SKIPPED],
    ]
    assert lines[2].endswith("a list of calls")
    assert lines[5:] == ["3 of 4 steps ran", "not run: nixl: can't be imported"]


def test_without_torch_what_needs_it_is_not_run_and_says_why():
    lines = account.table(NUMPY, {}, {})
    assert lines[2].split() == ["capture", SKIPPED, "not", "run"]
    assert lines[5:] == [
        "2 of 4 steps ran",
        "not run: capture: numpy has no captures",
        "not run: nixl: numpy is not NIXL's",
    ]


def test_a_step_that_passed_without_what_it_was_to_show_is_named():
    steps = {"protocols": step(PASSED, "torch", cupy=False), "capture": step(SKIPPED, "no torch")}
    assert account.unshown(steps, {"protocols": '"cupy": false', "machine": "torch"}) == []
    assert account.unshown(steps, {"protocols": '"cupy": true', "capture": "torch"}) == [
        '`protocols` was to show `"cupy": true`: it says `passed`: torch',
        "`capture` was to show `torch`: it says `skipped`: no torch",
    ]


def test_it_is_said_whether_cupy_was_there():
    assert protocols.with_cupy(SimpleNamespace(__version__="14.0"), "") == "cupy 14.0"
    assert protocols.with_cupy(None, "ModuleNotFoundError") == "nothing of cupy was tried: ModuleNotFoundError"
