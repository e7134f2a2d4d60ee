"""`make gpu-check` on the stand-in: its steps, and that they notice what is wrong."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from gpu_check import host, jobs, kernels, plans, posting, protocols, speed, streams, transfers
from gpu_check.dry_arena import DryArena
from gpu_check.far import Far
from gpu_check.outcome import FAILED, PASSED, SKIPPED, StepFailedError, StepSkippedError

from pdkv import Engine, PdkvError
from pdkv._core import CudaLoop

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def dry(monkeypatch):
    monkeypatch.setenv("GPU_CHECK_DRY", "1")


class BrokenCopy:
    """A copy of which one byte is wrong, or one checksum: of what it read, 0, or of what it placed, 1."""

    def __init__(self, loop, copy, at, *, sums):
        self._loop, self._copy, self._at, self._sums = loop, copy, at, sums
        self.kernels = copy.kernels

    def run(self, rounds):
        return self._spoilt(self._copy.run(rounds))

    def tell(self, seconds):
        return self._spoilt(self._copy.tell(seconds))

    def _spoilt(self, told):
        if self._sums is None:
            byte = np.empty(1, np.uint8)
            self._loop.copy(byte.ctypes.data, self._at, 1)
            self._loop.wait()
            byte ^= 0x10
            self._loop.copy(self._at, byte.ctypes.data, 1)
            self._loop.wait()
        return told

    @property
    def sums(self):
        found = self._copy.sums
        if self._sums is not None:
            found[self._sums][0] ^= 1
        return found


class BrokenLoop:
    """A GPU whose kernels are broken."""

    def __init__(self, loop, *, sums=None):
        self._loop, self._sums = loop, sums
        self.kernels = loop.kernels

    def job(self, **options):
        lane, at = options["lanes"][-1], 0
        if options["dst_pages"]:
            at = options["dst_pages"][-1 // options["dst"][1]] * options["dst"][0]
        return BrokenCopy(self._loop, self._loop.job(**options), lane[1] + at, sums=self._sums)


def test_a_broken_kernel_is_noticed(arena):
    loop = CudaLoop()
    for seed, make in enumerate(jobs.GENERATORS):
        job = make(Random(seed))
        assert kernels.check(loop, arena, job, seed, sums=True, bulk=False)
        with pytest.raises(StepFailedError, match=r"1 of .* bytes are wrong after .*seed"):
            kernels.check(BrokenLoop(loop), arena, job, seed, sums=False, bulk=True)
        for which, where in enumerate(("read", "placed")):
            with pytest.raises(StepFailedError, match=f"checksum of page 0 as {where} is wrong"):
                kernels.check(BrokenLoop(loop, sums=which), arena, job, seed, sums=True, bulk=False)


def test_a_flag_before_its_bytes_or_its_sums_is_noticed(arena):
    loop, beside = CudaLoop(), CudaLoop()
    for seed, make in enumerate(jobs.GENERATORS):
        job = make(Random(seed))
        for sums in (False, True):
            kernels.check_flag(loop, beside, arena, job, seed, sums=sums, bulk=not sums)
        with pytest.raises(StepFailedError, match=r"1 of .* bytes are wrong when the flag had come"):
            kernels.check_flag(BrokenLoop(loop), beside, arena, job, seed, sums=False, bulk=False)
        with pytest.raises(StepFailedError, match="checksum of page 0 as read is wrong when the flag had come"):
            kernels.check_flag(BrokenLoop(loop, sums=0), beside, arena, job, seed, sums=True, bulk=False)


def test_a_flag_that_does_not_come_is_noticed(arena, monkeypatch):
    monkeypatch.setattr(kernels, "_PATIENCE_S", 0.01)
    ctypes.CDLL(os.environ["PDKV_CUDA_LIBRARY"]).standin_fail(b"flag", 1, 1)
    loop, job = CudaLoop(), jobs.whole_pages(Random(1))
    with pytest.raises(StepFailedError, match="the flag is 0 instead of 1"):
        kernels.check_flag(loop, CudaLoop(), arena, job, 1, sums=False, bulk=False)
    kernels.check(loop, arena, job, 1, sums=False, bulk=False)


def test_every_kernel_has_its_turn(arena):
    loop, ran = CudaLoop(), set()
    for seed in range(200):
        draw = Random(seed)
        job = jobs.GENERATORS[seed % len(jobs.GENERATORS)](draw)
        if job.src_bytes + job.dst_bytes < 1 << 18 or seed % 7 == 0:
            ran.update(kernels.check(loop, arena, job, seed, sums=seed % 2 == 0, bulk=seed % 3 == 0))
        if ran == set(loop.kernels):
            break
    assert ran == set(loop.kernels), set(loop.kernels) - ran


def test_a_kernel_that_never_ran_is_a_failure(monkeypatch):
    monkeypatch.setattr(kernels, "GENERATORS", (jobs.other_order,))
    with pytest.raises(StepFailedError, match="no job chose"):
        kernels.run(0.5)


def test_the_jobs_that_races_are_looked_for_in(monkeypatch):
    outcome = kernels.run_races(1)
    assert outcome.facts["kernels"] == ["pdkv2_copy_vectors_16_sums", "pdkv2_copy_bulk_sums"]
    monkeypatch.setitem(kernels.RACES, "vectors", kernels.RACES["bulk"])
    with pytest.raises(StepFailedError, match="where one by vectors with checksums was meant"):
        kernels.run_races(1)


class LateTensor:
    """As torch's: filled by a stream that has not come to it, which the array interface does not name."""

    def __init__(self):
        self._pool, self._asked = Engine.allocate(protocols.NBYTES, device="cuda:0"), None
        self.__dlpack__, self.__dlpack_device__ = self._pool.__dlpack__, self._pool.__dlpack_device__

    @property
    def __cuda_array_interface__(self):
        return {**self._pool.__cuda_array_interface__, "version": 2}

    def fill_(self, value):
        self._asked = np.full(protocols.NBYTES, value, np.uint8)

    def synchronize(self):
        loop = CudaLoop()
        loop.copy(self._pool.address, self._asked.ctypes.data, protocols.NBYTES)
        loop.wait()


def test_what_a_stream_still_writes_is_waited_for_before_it_is_registered(arena):
    tensor = LateTensor()
    assert protocols.registered(tensor, tensor.synchronize) == ["torch", "DLPack", "array interface"]
    with pytest.raises(StepFailedError, match="holds other bytes"):
        protocols.registered(LateTensor(), lambda: None)


def test_plans(arena):
    for seed in range(5):
        assert plans.check(CudaLoop(), arena, seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_transfers_in_one_process(arena, seed):
    for case in transfers._cuda_cases(arena):
        moved = transfers.Transfers(arena, Far(), case, seed)
        try:
            for operation in ("pull", "push", "read", "write"):
                moved.check(operation)
        finally:
            moved.close()


def test_a_wrong_byte_of_a_transfer_is_noticed(arena, monkeypatch):
    monkeypatch.setattr(transfers.caches, "moved", lambda arena, *given: given[4] ^ 1)
    moved = transfers.Transfers(arena, Far(), transfers.Case("gpu", "gpu", "cuda"), 1)
    try:
        with pytest.raises(StepFailedError, match="bytes are wrong"):
            moved.check("pull")
        with pytest.raises(StepFailedError, match="bytes are wrong"):
            moved.check("push")
    finally:
        moved.close()


class AskedArena(DryArena):
    """One that remembers what it was asked to compute."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def index(self, numbers):
        self.asked.append("index")
        return super().index(numbers)

    def wrong(self, buffer, flat):
        self.asked.append("wrong")
        return super().wrong(buffer, flat)


def test_what_a_transfer_must_leave_is_computed_by_the_arena_and_compared_where_that_is_here():
    arena = AskedArena()
    moved = transfers.Transfers(arena, Far(), transfers.Case("gpu", "gpu", "cuda"), 1)
    try:
        moved.check("pull")
        assert arena.asked == ["index", "index", "wrong"]
        arena.asked.clear()
        moved.check("push")
        assert arena.asked == ["index", "index"], "the other end names its bytes"
    finally:
        moved.close()


def test_two_processes():
    outcome = transfers.two_processes(30)
    assert outcome.state == PASSED
    assert "no byte is wrong (by numpy, on the stand-in)" in outcome.text
    assert any(name.startswith("pull, gpu and gpu over cuda") for name in outcome.facts)


def test_without_an_adapter_ucx_is_left_out_and_named():
    with pytest.raises(StepSkippedError, match="`ucx` is required and not usable") as raised:
        transfers.ucx(30)
    assert raised.value.absent == ["a GPU that `ucx` reaches"]


def test_slow_streams():
    outcome = streams.run(30)
    assert outcome.facts["wrong_without_stream"] > 0


def test_an_overtaking_transfer_is_noticed(monkeypatch):
    monkeypatch.setitem(streams.CHECKS, "export", lambda pair, work: streams._export(pair, work, told=False))
    with pytest.raises(StepFailedError, match=r"the transfer came first.*export"):
        streams.run(30)


def test_the_table(monkeypatch):
    monkeypatch.setattr(speed, "BLOCK_BYTES", (2048, 16384))
    monkeypatch.setattr(speed, "DRY_TOTAL_BYTES", 256 << 10)
    outcome = speed.run(60)
    rows = outcome.rows
    assert outcome.facts["bulk"] == "never: it was no faster when it was measured", "the stand-in's is slow"
    assert {row["taken"] for row in rows} == {"kernel"}
    assert all(row["fraction"] == row["fraction_kernel"] for row in rows)
    assert [row["block_bytes"] for row in rows] == [2048, 16384]
    for row in rows:
        assert (row["wrong"], row["taken"]) == (0, "kernel")
        assert {"kernel_gb_s", "bulk_gb_s", "loop_gb_s", "torch_gb_s", "limit_gb_s", "fraction", "times_loop"} <= set(
            row
        )
        assert "batch_gb_s" in row or "batch_missing" in row


def test_a_gpu_that_measures_nothing_is_said_to(arena):
    class Full:
        def ways(self):
            raise PdkvError("no room")

    assert speed.ways(Full()) == {"bulk_from_bytes": None, "ways_missing": "no room"}


def test_a_wrong_byte_in_the_table_is_noticed(monkeypatch):
    monkeypatch.setattr(speed, "BLOCK_BYTES", (16384,))
    monkeypatch.setattr(speed, "DRY_TOTAL_BYTES", 256 << 10)
    kernel = speed.Blocks.kernel
    monkeypatch.setattr(
        speed.Blocks,
        "kernel",
        lambda blocks, loop, **how: BrokenCopy(loop, kernel(blocks, loop, **how), blocks.dst.address, sums=None),
    )
    with pytest.raises(StepFailedError, match="bytes are wrong after"):
        speed.run(60)


def test_host_and_posting(monkeypatch):
    monkeypatch.setattr(host, "DRY_TOTAL_BYTES", 128 << 10)
    monkeypatch.setattr(host, "BLOCK_BYTES", (4096, 65536))
    outcome = host.run(30)
    assert len(outcome.rows) == 4
    assert "no byte is wrong (by numpy, on the stand-in)" in outcome.text
    monkeypatch.setattr(posting, "LAYERS", (1, 4))
    assert posting.run(30).facts["growth"] > 0


def command(tmp_path, only, **environment):
    return subprocess.run(
        [sys.executable, "-m", "gpu_check", "--dry", "--out", str(tmp_path), "--only", only],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(["benches", os.environ.get("PYTHONPATH", "")])},
        check=False,
    )


def test_the_command_fails_when_a_kernel_writes_a_wrong_byte(tmp_path):
    done = command(tmp_path, "plans", PDKV_STANDIN_FAIL="wrong:1")
    assert done.returncode == 1, done.stdout + done.stderr
    step = json.loads((tmp_path / "gpu-check.json").read_text())["steps"]["plans"]
    assert step["state"] == FAILED
    assert step["text"].startswith("1 bytes are wrong after ["), step["text"]
    assert "NOT GOOD" in done.stdout


def test_the_command(tmp_path):
    done = command(tmp_path, "machine,plans,sanitizer")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    assert {name: step["state"] for name, step in report["steps"].items()} == {
        "machine": PASSED,
        "plans": PASSED,
        "sanitizer": SKIPPED,
    }
    assert report["dry"]
    assert all(floor["kept"] is None for floor in report["floors"])
    assert (tmp_path / "gpu-check.png").read_bytes().startswith(b"\x89PNG")
