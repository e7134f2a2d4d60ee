"""The command itself, on the real engine, in two processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdkv.bench import floors
from pdkv.bench.side import Toolkit

COMMAND = [sys.executable, "-m", "pdkv.bench"]
TINY = ["--model", "tiny", "--isl", "256", "--iters", "2", "--format", "json"]


def bench(*arguments, code=0):
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == code, done.stderr
    return done


def rows(*arguments):
    return json.loads(bench(*arguments).stdout)["rows"]


@pytest.mark.parametrize("op", ["pull", "push", "read", "write"])
def test_every_byte_arrives_by_every_path(op):
    found = rows(*TINY, "--op", op, "--transport", "inproc,shm,cma,tcp")
    ours = [row for row in found if row["kind"] == "pdkv"]
    assert [row["transport"] for row in ours] == ["inproc", "shm", "cma", "tcp"]
    assert {row["wrong"] for row in found} == {0}
    assert {row["staged_bytes"] for row in ours} == {0}
    assert all(row["limit_gb_per_s"] > 0 and row["ratio"] is not None for row in ours)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("how", ["random", "runs:4", "none"])
def test_every_layout_and_fragmentation(layout, how):
    found = rows(
        *TINY, "--layout", layout, "--fragmentation", how, "--transport", "shm,tcp", "--burst", "3", "--no-limit"
    )
    assert {row["wrong"] for row in found} == {0}


def test_runs_merge():
    random, runs = (
        rows(*TINY, "--fragmentation", how, "--transport", "shm", "--no-limit")[0]["runs"]
        for how in ("random", "runs:8")
    )
    assert runs < random


def test_auto_takes_the_best_path():
    ours = rows(*TINY)[0]
    assert (ours["requested"], ours["transport"]) == ("auto", "shm")


def test_adopted_memory_takes_the_shared_path():
    assert rows(*TINY, "--transport", "shm", "--memory", "adopt")[0]["transport"] == "shm"


def test_raw_blocks_of_odd_sizes():
    found = rows(
        "--block-bytes", "1000,4KiB,1MiB", "--total", "8MiB", "--iters", "1", "--transport", "cma", "--format", "json"
    )
    assert {row["wrong"] for row in found} == {0}
    assert [row["block_bytes"] for row in found[::2]] == [1000, 4096, 1 << 20]


def test_mla_and_many_streams():
    shape = ["--model", "deepseek-v3", "--isl", "64", "--iters", "1", "--format", "json"]
    found = rows(*shape, "--transport", "tcp", "--streams", "3")
    assert {row["wrong"] for row in found} == {0}


def test_two_roles_as_on_two_machines():
    producer = subprocess.Popen(
        [*COMMAND, "--role", "producer", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    try:
        address = producer.stdout.readline().split()[-1]
        for op in ("pull", "push"):
            found = rows(*TINY, "--role", "consumer", "--connect", address, "--op", op)
            assert {row["wrong"] for row in found} == {0}
    finally:
        producer.send_signal(signal.SIGINT)
        assert producer.wait(240) == 130
        producer.stdout.close()


def test_a_killed_producer_ends_the_run_with_2():
    consumer = subprocess.Popen(
        [*COMMAND, "--model", "tiny", "--iters", "100000", "--timeout", "20"], stderr=subprocess.PIPE, text=True
    )
    children = Path(f"/proc/{consumer.pid}/task/{consumer.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.01)
    time.sleep(2)
    os.kill(int(found[0]), signal.SIGKILL)
    assert consumer.wait(240) == 2
    assert "error:" in consumer.stderr.read()
    consumer.stderr.close()


def test_a_machine_without_the_memory_says_so():
    done = bench("--isl", "30000000", code=2)
    assert "MiB" in done.stderr


@pytest.mark.slow
def test_latency_mode():
    done = bench("--mode", "latency", "--transport", "shm", "--format", "json")
    figures = {figure["name"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert set(figures) == {
        "one-block read",
        "one-block pull",
        "submit 4,096 blocks",
        "GIL: counting loses",
        "idle with 10 peers",
    }
    assert {figure["wrong"] for figure in figures.values()} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["inproc", "shm", "cma", "tcp"])
@pytest.mark.parametrize("order", ["engine-first", "peer-first", "never"])
def test_a_process_ends_well_whatever_is_dropped_first(transport, order):
    done = subprocess.run([sys.executable, "-m", "pdkv.bench.drops", transport, order], timeout=240, check=False)
    assert done.returncode == 0


def test_plans_of_the_promised_size_stay_small():
    found = list(floors.planning_floors(Toolkit.real(), seed=1, samples=1))
    assert [floor.name.rpartition(", ")[2] for floor in found] == ["runs:16", "random"]
    assert all(float(floor.note.removesuffix(" MB")) < floors.PLAN_BYTES / 1e6 for floor in found)
