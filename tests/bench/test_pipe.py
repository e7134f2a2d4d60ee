"""`pdkv bench --mode pipe`: the parts by themselves, and all of it with a stand-in for the library."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.fake import Native, World
from pdkv.bench import producer, tensor_floors, turns
from pdkv.bench.measure import Bench
from pdkv.bench.pipe import measure, peers, tensors
from pdkv.bench.pipe.exchange import Exchange, Way
from pdkv.bench.pipe.tensors import Tensors
from pdkv.bench.ucx import Ucx
from pdkv.errors import ConfigError, PdkvError, UnsupportedError

LARGE = Exchange((5, 40_000), "bfloat16", 2, "numpy", threads=2, seed=3)
SMALL = Exchange((1024,), "uint8", 20, "numpy", threads=2, seed=3)
ODD = Exchange((3, 5), "bfloat16", 7, "numpy", threads=2, seed=3)
SHM = Way("shm", threads=2, streams=1)
PLAIN = str(Path(__file__).with_name("plain_end.py"))


@contextmanager
def bench(world, **options):
    with producer.threaded(world.kit, 120.0) as channel:
        yield Bench(world.kit, channel, **{"iters": 3, **options})
    assert world.open_engines == 0


def run(world, ways=(SHM,), large=LARGE, small=SMALL, peers=(), **options):
    plan = measure.Plan(ways, large, small, peers)
    with bench(world, **options) as runner:
        return measure.run(runner, plan, lambda text: None)


def test_exchanges_travel_as_json_and_are_checked():
    assert Exchange.from_json(json.loads(json.dumps(LARGE.to_json()))) == LARGE
    way = replace(SHM, ucx=Ucx(tls="tcp"))
    assert Way.from_json(json.loads(json.dumps(way.to_json()))) == way
    assert (LARGE.dtype_name, replace(LARGE, library="torch").dtype_name) == ("uint16", "bfloat16")
    assert LARGE.label() == "2 x [5, 40000] uint16"
    for change in ({"shape": []}, {"shape": [0]}, {"shape": [1.5]}, {"shape": "no"}, {"dtype": "object"}, {"count": 0},
                   {"library": "os"}, {"shape": [1 << 40]}, {"seed": "1"}):  # fmt: skip
        with pytest.raises(ConfigError):
            Exchange.from_json({**LARGE.to_json(), **change})
    for change in ({"transport": "inproc"}, {"transport": "rdma"}, {"threads": True}, {"ucx": {}}):
        with pytest.raises(ConfigError):
            Way.from_json({**SHM.to_json(), **change})


@pytest.mark.parametrize("exchange", [LARGE, SMALL, ODD, replace(ODD, shape=(1 << 19, 3)), replace(ODD, count=1)])
@pytest.mark.parametrize("native", [None, Native()])
def test_every_byte_of_every_tensor_is_checked(exchange, native, capsys):
    made = Tensors(exchange, native)
    made.fill(5)

    def wrong(received):
        return tensors.count_wrong(received, exchange, 5, native, "test")

    received = [tensor.copy() for tensor in made.all]
    assert wrong(received) == 0
    assert capsys.readouterr().err == ""
    for at in (0, received[-1].nbytes - 1):
        received[-1].reshape(-1).view(np.uint8)[at] ^= 1
        assert wrong(received) == 1
        received[-1].reshape(-1).view(np.uint8)[at] ^= 1
    assert wrong(received[:-1]) == exchange.tensor_bytes
    assert wrong([*received[:-1], received[-1].view(np.int8)]) == exchange.tensor_bytes
    assert wrong([*received[:-1], received[-1].reshape(1, -1)]) == exchange.tensor_bytes
    made.fill(6)
    assert wrong(made.all) > exchange.total_bytes * 0.9
    if exchange.count > 1:
        assert wrong([received[1], received[0], *received[2:]]) > 0
    assert "wrong: test" in capsys.readouterr().err


@pytest.mark.parametrize("transport", ["shm", "cma", "tcp"])
def test_a_pair_is_measured_beside_the_limit_of_its_transport(transport):
    world = World()
    pair, limit, small = run(world, [replace(SHM, transport=transport)])
    assert (pair.kind, pair.name, pair.path, pair.what) == ("pdkv", "pipe", transport, "2 x [5, 40000] uint16")
    assert limit.name == {"shm": "scattered copy", "cma": "process_vm_readv", "tcp": "sendmsg + readv"}[transport]
    assert (pair.items, pair.total_bytes, pair.iters, limit.iters) == (2, 800_000, 3, 3)
    assert pair.limit_gb_per_s == limit.gb_per_s
    assert pair.ratio == pytest.approx(limit.p50_us / pair.p50_us, rel=0.05)
    assert limit.pdkv_ratio == pytest.approx(limit.p50_us / pair.p50_us, rel=0.05)
    assert (small.kind, small.path, small.what, small.ratio) == ("pdkv", "stream", "20 x [1024] uint8", None)
    assert small.items_per_s == pytest.approx(20 / small.p50_us * 1e6, rel=0.01)
    assert {line.wrong for line in (pair, limit, small)} == {0}


def test_the_limit_has_a_contiguous_page_for_each_thread_and_stream():
    case = measure.limit_case(replace(SHM, transport="tcp", threads=2, streams=4), LARGE)
    assert (case.pages, case.page_bytes, case.total_bytes) == (4, 200_000, LARGE.total_bytes)
    assert [table.tolist() for table in case.tables("src")] == [[0, 1, 2, 3]]
    odd = measure.limit_case(replace(SHM, threads=4), ODD)
    assert (odd.pages, odd.total_bytes) == (1, ODD.total_bytes)


def test_ucx_is_measured_beside_its_loop():
    way = Way("ucx", 2, 1, Ucx(tls="tcp", window=7))
    pair, limit = run(World(path="ucx"), [way], small=None)
    assert (pair.path, limit.name, limit.wrong) == ("ucx", "ucp_put_nbx loop", 0)
    assert Native.UcxLoop.open == 0


def test_limits_and_small_tensors_can_be_left_out():
    (pair,) = run(World(), small=None, limits=False)
    assert (pair.ratio, pair.limit_gb_per_s) == (None, None)


@pytest.mark.parametrize("fault", ["flip", "swap", "cast"])
def test_a_wrong_byte_tensor_or_order_is_counted(fault, capsys):
    lines = run(World(fault, transfer=2), small=None)
    assert lines[0].wrong > 0
    assert "wrong: pipe stamp" in capsys.readouterr().err


def test_what_is_staged_is_shown_and_another_path_is_refused():
    assert run(World(staged=7), small=None, limits=False)[0].staged_bytes == 14
    with pytest.raises(PdkvError, match="`cma` was required, the path was `tcp`"):
        run(World(path="tcp"), [replace(SHM, transport="cma")], limits=False)


def test_a_pipe_that_fails_ends_the_run():
    with pytest.raises(PdkvError, match="made to fail"):
        run(World("fail", transfer=1), small=None)


def test_a_machine_without_the_memory_says_so():
    with pytest.raises(PdkvError, match="MiB"):
        run(World(), large=replace(LARGE, shape=(1 << 36,)))


@pytest.mark.parametrize("wrong", ["", "flip"])
def test_a_peer_is_filled_moved_and_checked(wrong, capfd):
    peer = peers.Peer("plain", [PLAIN, wrong], ODD, 120.0)
    try:
        for stamp in (1, 2):
            peer.fill(stamp)
            assert peer.run() > 0
            assert (peer.count_wrong(stamp) > 0) == (wrong == "flip")
    finally:
        peer.close()
    assert peer.note == "made of one socket"
    assert ("wrong: plain stamp 1" in capfd.readouterr().err) == (wrong == "flip")


def test_a_peer_that_cannot_start_or_go_on_says_why():
    with pytest.raises(PdkvError, match="no such device"):
        peers.Peer("plain", [PLAIN, "open"], ODD, 120.0)
    peer = peers.Peer("plain", [PLAIN, "send"], ODD, 120.0)
    with pytest.raises(PdkvError, match="the wire is cut"):
        peer.run()
    peer.close()


@pytest.mark.parametrize(
    ("torch", "far", "reason"),
    [(False, False, "torch is not installed"), (True, True, "both ends of it would be on this machine")],
)
def test_a_peer_that_is_not_measured_keeps_its_line_and_says_why(torch, far, reason, monkeypatch):
    monkeypatch.setattr(peers, "has_torch", lambda: torch)
    plan = measure.Plan([SHM], LARGE, SMALL, ("gloo", "pickle"), far)
    with bench(World(), limits=False) as runner:
        lines = measure.run(runner, plan, lambda text: None)
    others = [line for line in lines if line.kind == "peer"]
    assert [line.name for line in others] == ["gloo send/recv", "pickle over TCPStore"] * 2
    assert {line.note for line in others} == {f"not measured: {reason}"}
    assert {(line.iters, line.gb_per_s, line.pdkv_ratio) for line in others} == {(0, None, None)}


def test_pickling_is_no_part_of_the_library(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "has_torch", lambda: True)
    monkeypatch.setattr(peers, "_STORE_PROGRAM", tmp_path / "gone.py")
    ((_, make),) = peers.makers(["pickle"], SMALL, 120.0, far=False)
    with pytest.raises(UnsupportedError, match="no part of pdkv"):
        make()
    with pytest.raises(ConfigError):
        peers.makers(["mpi"], SMALL, 120.0, far=False)


def test_a_slow_peer_gets_fewer_turns(monkeypatch):
    monkeypatch.setattr(turns, "_PATIENCE_S", -1.0)
    entry = measure.Entry("peer", "slow", rival=peers.Mover())
    with bench(World(), warmup=0) as runner:
        turns.take_turns(runner, [entry], lambda: None)
    assert entry.seconds == []


@pytest.fixture
def lines():
    """A pair and many small tensors by `shm`, with lines of peers that were not measured."""
    with bench(World()) as runner:
        plan = measure.Plan([SHM], LARGE, SMALL, ("gloo", "pickle"), far=True)
        return measure.run(runner, plan, lambda text: None)


def test_floors_judge_pipes(lines):
    pair, limit, gloo, pickled, small, *_ = lines
    small = replace(small, items=tensor_floors.SMALL, items_per_s=50_000.0)
    pairs = [replace(pair, ratio=0.85, path=transport) for transport in tensor_floors.TRANSPORTS]
    good = {
        **dict(zip(tensor_floors.TRANSPORTS, pairs, strict=True)),
        "gloo": replace(gloo, pdkv_ratio=2.0),
        "pickle": replace(pickled, pdkv_ratio=10.0),
        "small": small,
        "limit": limit,
    }

    def missed(**changed):
        judged = zip(good, tensor_floors.pipe_floors([*(good | changed).values()]), strict=False)
        return {name: floor.ok for name, floor in judged if floor.ok is not True}

    assert missed() == {}
    assert missed(shm=replace(pairs[0], ratio=0.84)) == {"shm": False}
    assert missed(cma=replace(pairs[1], wrong=1)) == {"cma": False}
    assert missed(tcp=replace(pairs[2], ratio=None)) == {"tcp": False}
    assert missed(tcp=replace(pairs[2], path="cma")) == {"tcp": False}
    assert missed(gloo=replace(good["gloo"], pdkv_ratio=1.9)) == {"gloo": False}
    assert missed(pickle=replace(good["pickle"], wrong=1)) == {"pickle": False}
    assert missed(small=replace(small, items_per_s=49_999.0)) == {"small": False}
    assert missed(gloo=gloo, pickle=pickled) == {"gloo": None, "pickle": None}


def test_floors_without_the_memory_say_so(monkeypatch):
    monkeypatch.setattr(tensor_floors, "SHAPE", (1 << 36,))
    monkeypatch.setattr(tensor_floors, "ENTRIES", 1 << 20)
    with bench(World()) as runner:
        floors, lines = tensor_floors.run(runner, 1, 2, lambda text: None)
    assert [(floor.name, floor.ok) for floor in floors] == [("pipe", None), ("lookup", None)]
    assert all("MiB" in floor.note for floor in floors)
    assert lines == []
