"""`pdkv bench --mode pipe` and `--mode lookup`, on real engines, in two processes."""

import os
from ctypes.util import find_library

import pytest

from bench.test_real import rows
from pdkv import wheels

SHAPE = ["--shape", "3,50,7,16", "--iters", "2", "--format", "json"]
FEW = ["--entries", "20", "--tokens", "50", "--model", "tiny", "--isl", "256", "--iters", "2", "--format", "json"]
FOUND = bool(find_library("ucp") or wheels.folders())


def test_tensors_arrive_by_every_transport():
    found = rows("--mode", "pipe", "--shape", "8,64,8,128", "--small", "300", "--iters", "2", "--format", "json")
    ours = [row for row in found if row["kind"] == "pdkv"]
    assert [row["path"] for row in ours] == ["shm", "cma", "tcp", "stream"]
    assert {row["wrong"] for row in found} == {0}
    assert {row["staged_bytes"] for row in ours} == {0}
    assert all(row["ratio"] is not None and row["iters"] == 2 for row in ours[:3])
    assert ours[3]["items_per_s"] > 0


def test_tensors_smaller_than_a_page_and_of_odd_sizes():
    for shape in ("1", "3,50,7", "32769"):
        found = rows("--mode", "pipe", "--shape", shape, "--dtype", "uint8", "--small", "0", *SHAPE[2:], "--no-limit")
        assert {row["wrong"] for row in found} == {0}


@pytest.mark.skipif(not FOUND and os.environ.get("PDKV_UCX_REQUIRED") != "1", reason="there is no UCX: make ucx")
@pytest.mark.parametrize("policy", ["any", "never"])
def test_tensors_arrive_over_ucx(policy):
    way = ["--transport", "ucx", "--ucx-tls", "posix,cma", "--ucx-one-sided", policy]
    found = rows("--mode", "pipe", "--shape", "8,64,8,128", "--small", "0", *SHAPE[2:], *way)
    ours, loop = found[:2]
    assert (ours["path"], loop["name"]) == ("ucx", "ucp_put_nbx loop")
    assert {row["wrong"] for row in found} == {0}
    assert ours["note"].startswith("put/get" if policy == "any" else "active messages")


def test_prompts_are_found_here_and_there_and_blocks_are_selected_by_every_transport():
    found = rows("--mode", "lookup", "--transport", "shm,cma,tcp", *FEW)
    assert {row["wrong"] for row in found} == {0}
    lookups, blocks = found[:12], found[12:]
    assert [row["name"] for row in lookups[:3]] == [
        "drop_select, here",
        "index alone, here",
        "drop_select, two processes",
    ]
    assert [(row["name"], row["path"]) for row in blocks if row["kind"] == "pdkv"] == [
        (name, path) for path in ("shm", "cma", "tcp") for name in ("drop_select_into", "pull")
    ]
    assert all(row["ratio"] is not None for row in blocks)
