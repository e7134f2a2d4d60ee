import json
import statistics
from contextlib import contextmanager
from dataclasses import replace

import pytest

from bench.fake import Native, World
from bench.test_cases import CASE
from pdkv.bench import floors, latency, perftest, producer, ucx_floors
from pdkv.bench.measure import Bench
from pdkv.bench.ucx import Ucx
from pdkv.errors import TransferError, UnsupportedError


@contextmanager
def bench(world, **options):
    with producer.threaded(world.kit, 120.0) as channel:
        yield Bench(world.kit, channel, iters=3, **options)
    assert world.open_engines == 0


@pytest.mark.parametrize("op", ["pull", "push", "read", "write"])
@pytest.mark.parametrize("path", ["shm", "cma", "tcp"])
def test_every_operation_moves_every_byte_beside_its_limit(op, path):
    world = World(path=path)
    with bench(world) as runner:
        ours, limit = runner.run(replace(CASE, op=op, transport="auto", streams=2))
    assert (ours.kind, ours.op, ours.transport, ours.requested) == ("pdkv", op, path, "auto")
    assert (limit.kind, limit.transport) == ("limit", path)
    assert limit.op == {"shm": "scattered copy", "cma": "process_vm_readv", "tcp": "sendmsg + readv"}[path]
    assert ours.wrong == limit.wrong == 0
    assert ours.num_blocks * ours.block_bytes == ours.total_bytes == CASE.total_bytes
    assert ours.ratio == pytest.approx(limit.p50_us / ours.p50_us, rel=0.05)
    assert limit.gb_per_s == ours.limit_gb_per_s
    assert next(world.numbers) == (3 + 2) * CASE.requests


UCX = replace(CASE, transport="auto", ucx=Ucx(tls="tcp", window=7))


@pytest.mark.parametrize(("op", "verb"), [("pull", "get"), ("push", "put"), ("read", "get"), ("write", "put")])
def test_ucx_is_measured_beside_the_loop_of_the_same_verb_and_its_own_benchmark(op, verb, monkeypatch):
    monkeypatch.setattr(perftest, "find", lambda version, library: perftest.Tool("ucx_perftest", "1.2.3"))
    asked = []

    def run(tool, test, message_bytes, messages, window, given, timeout_s):
        asked.append((test, message_bytes, window, given))
        return perftest.Result(messages, 5e9 if window == 7 else 4e9)

    monkeypatch.setattr(perftest, "run", run)
    with bench(World(path="ucx")) as runner:
        ours, loop, one_block, peer = runner.run(replace(UCX, op=op))
    assert [row.op for row in (loop, one_block)] == [f"ucp_{verb}_nbx loop", f"ucp_{verb}_nbx loop, one block"]
    assert loop.kind == one_block.kind == "limit"
    assert ours.wrong == loop.wrong == one_block.wrong == 0
    assert (ours.limit_gb_per_s, loop.ratio) == (loop.gb_per_s, 1.0)
    test = "ucp_get" if verb == "get" else "ucp_put_bw"
    assert (peer.kind, peer.op, peer.gb_per_s) == ("peer", f"ucx_perftest {test}", 5.0)
    assert peer.pdkv_ratio == pytest.approx(ours.gb_per_s / 5.0, rel=0.05)
    windows = [1, 7] if verb == "put" else [7]
    assert asked[: len(windows)] == [(test, CASE.page_bytes, window, {"TLS": "tcp"}) for window in windows]
    assert all(one == (test, CASE.page_bytes, 7, {"TLS": "tcp"}) for one in asked[len(windows) :])
    assert "7 under way" in peer.note
    assert Native.UcxLoop.open == 0


def test_where_ucx_s_own_benchmark_is_missing_or_fails_its_row_says_why(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(perftest.wheels, "folders", list)
    with bench(World(path="ucx")) as runner:
        *_, peer = runner.run(UCX)
    assert (peer.gb_per_s, peer.ratio, peer.pdkv_ratio) == (0.0, None, None)
    assert "ucx_perftest" in peer.note

    monkeypatch.setattr(perftest, "find", lambda version, library: perftest.Tool("ucx_perftest", "1.2.3"))
    monkeypatch.setattr(perftest, "run", lambda *_: perftest.parse("no device"))
    with bench(World(path="ucx")) as runner:
        *_, peer = runner.run(UCX)
    assert (peer.gb_per_s, peer.iters) == (0.0, 0)
    assert "no device" in peer.note


def test_a_loop_that_cannot_be_opened_says_why(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(Native.UcxLoop, "refusal", UnsupportedError("no UCX anywhere"))
    with bench(World(path="ucx")) as runner:
        ours, loop, _ = runner.run(UCX)
    assert (loop.op, loop.gb_per_s) == ("ucp_get_nbx loop", 0.0)
    assert "no UCX anywhere" in loop.note
    assert ours.ratio is None


@pytest.mark.parametrize("transfer", [0, 4, 8])
@pytest.mark.parametrize(("fault", "wrong"), [("flip", 1), ("skip", None)])
def test_wrong_bytes_are_counted_in_any_iteration(fault, wrong, transfer, capsys):
    with bench(World(fault, transfer)) as runner:
        row = runner.run(CASE)[0]
    assert row.wrong == wrong or (wrong is None and 0 < row.wrong <= CASE.page_bytes)
    assert "wrong: pull stamp" in capsys.readouterr().err


def test_a_page_left_out_shows_the_bytes_of_the_copy_before(capsys):
    with bench(World("skip", 4)) as runner:
        runner.run(CASE)
    line = capsys.readouterr().err
    assert "layer 0 block" in line
    assert "of layer 0 block" in line.partition("holding byte")[2]


def test_bytes_outside_the_table_are_watched(capsys):
    with bench(World("spill", 5)) as runner:
        row = runner.run(CASE)[0]
    assert row.wrong > 0
    assert "outside the table" in capsys.readouterr().err


def test_staged_bytes_and_path_are_reported():
    with bench(World(path="tcp", staged=100), limits=False) as runner:
        (row,) = runner.run(replace(CASE, transport="auto"))
    assert row.staged_bytes == 100 * CASE.requests
    assert row.limit_gb_per_s is row.ratio is None


def test_another_path_than_the_required_one_is_an_error():
    with bench(World(path="tcp")) as runner, pytest.raises(Exception, match="`shm` was required"):
        runner.run(CASE)


@pytest.mark.parametrize("op", ["pull", "push"])
def test_a_failing_transfer_ends_the_case_with_its_own_error(op):
    with bench(World("fail", 3)) as runner:
        with pytest.raises(TransferError, match="made to fail"):
            runner.run(replace(CASE, op=op))
        assert runner.run(replace(CASE, op=op))[0].wrong == 0


def test_ticks_tell_a_progress_bar():
    ticks = []
    with bench(World(), tick=lambda: ticks.append(1)) as runner:
        runner.run(CASE)
    assert len(ticks) == 3


def test_row_keys_are_the_documented_ones():
    with bench(World()) as runner:
        plain = runner.run(CASE)[0].to_json()
    named = "kind transport op model block_bytes num_blocks total_bytes gb_per_s limit_gb_per_s ratio wrong"
    named += " staged_bytes p50_us p99_us plan_us post_us seed versions"
    assert list(plain)[:18] == named.split()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["plan_us"] == 1.0 * CASE.requests


def test_the_gil_counter_sees_a_holder():
    with latency.Counter() as counter:
        free = statistics.median(counter.rate(lambda: None) for _ in range(3))
        assert free >= 0
        assert counter.rate(lambda: sum(range(3_000_000))) > 0


def test_a_floor_judges_value_and_bytes():
    with bench(World()) as runner:
        row = runner.run(CASE)[0]
    assert floors.ratio_floor(replace(row, ratio=0.9), 0.9).ok is True
    assert floors.ratio_floor(replace(row, ratio=0.89), 0.9).ok is False
    assert floors.ratio_floor(replace(row, ratio=None), 0.9).ok is False
    wrong = floors.ratio_floor(replace(row, ratio=1.0, wrong=1), 0.9)
    assert wrong.ok is False
    assert "1 WRONG" in wrong.note


def test_latency_floors_compare_pull_with_read():
    read = latency.Figure("one-block read", "shm", 4.0, 5.0, "us", 10)
    pull = latency.Figure("one-block pull", "shm", 64.0, 70.0, "us", 10)
    assert [floor.ok for floor in floors.latency_floors(read, pull)] == [True, True]
    assert [floor.ok for floor in floors.latency_floors(replace(read, value=5.1), replace(pull, value=65.2))] == [
        False,
        False,
    ]
    assert floors.at_most(replace(read, wrong=1), 5.0).ok is False


def test_ucx_is_judged_by_its_loop_and_by_its_own_benchmark():
    with bench(World()) as runner:
        row = replace(runner.run(CASE)[0], gb_per_s=9.0, ratio=0.9)
    one = replace(row, kind="limit", op="ucp_put_nbx loop, one block", gb_per_s=9.0)
    program = replace(row, kind="peer", op="ucx_perftest ucp_put_bw", gb_per_s=10.0)
    assert ucx_floors.against_perftest([row, one, program]).ok is True
    assert ucx_floors.against_perftest([row, replace(one, gb_per_s=8.9), program]).ok is False
    assert ucx_floors.against_perftest([row, replace(one, wrong=1), program]).ok is False
    missing = ucx_floors.against_perftest([row, one, replace(program, gb_per_s=0.0, note="it isn't installed")])
    assert (missing.ok, missing.note) == (None, "it isn't installed")
    sizes = [case.page_bytes for case in ucx_floors.cases(1 << 29, 1, 7)]
    assert sizes == [*ucx_floors.SIZES, *ucx_floors.SIZES, 64 << 10]  # written, read; a page of the whole cache


def test_every_promise_has_a_bound():
    assert {transport: sorted(bounds) for transport, bounds in floors.RATIOS.items()} == {
        "shm": list(floors.BLOCK_SIZES),
        "cma": list(floors.BLOCK_SIZES),
        "tcp": list(floors.BLOCK_SIZES[1:]),
    }
    assert floors.steps() == 21
