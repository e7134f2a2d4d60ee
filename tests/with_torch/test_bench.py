"""`pdkv bench` with torch: the carriers that a pipe is compared with, and the scan that a lookup is."""

import pytest

from bench.test_real import rows
from pdkv.bench.lookup import measure
from pdkv.bench.lookup.prompts import Prompts
from pdkv.bench.lookup.scan import Scan
from pdkv.bench.pipe import peers
from pdkv.bench.pipe.exchange import Exchange

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]  # each process imports torch first

EXCHANGE = Exchange((3, 5, 2000), "bfloat16", 2, "torch", threads=2, seed=3)
LARGE = Exchange((9 << 20,), "uint8", 1, "torch", threads=2, seed=3)


@pytest.mark.parametrize("name", list(peers.PEERS))
@pytest.mark.parametrize("exchange", [EXCHANGE, LARGE], ids=["small", "more than a store's default server takes"])
def test_every_byte_arrives_by_other_carriers(name, exchange):
    ((_, make),) = peers.makers([name], exchange, 300.0, far=False)
    carrier = make()
    try:
        for stamp in (1, 2):
            carrier.fill(stamp)
            assert carrier.run() > 0
            assert carrier.count_wrong(stamp) == 0
            assert carrier.count_wrong(stamp + 1) > 0
    finally:
        carrier.close()
    assert carrier.note.startswith("torch ")
    assert ("the older one" in carrier.note) == (name == "pickle" and exchange is LARGE)


def test_a_pipe_is_measured_beside_both():
    shape = ["--shape", "4,40,8,64", "--small", "50", "--iters", "2", "--transport", "shm", "--format", "json"]
    found = rows("--mode", "pipe", "--timeout", "300", *shape)
    assert {row["wrong"] for row in found} == {0}
    assert [row["name"] for row in found if row["kind"] == "peer"] == ["gloo send/recv", "pickle over TCPStore"] * 2
    assert all(row["pdkv_ratio"] > 0 and row["path"] == "tcp" for row in found if row["kind"] == "peer")
    assert {row["what"].split()[-1] for row in found} == {"bfloat16", "uint8"}


def test_prompts_are_tensors_and_the_scan_compares_them_as_simple_buffer_does():
    prompts = Prompts(entries=8, tokens=16, library="torch", seed=5)
    scan = Scan("torch")
    here = measure.Here(scan, prompts, prompts.draw())
    wanted = prompts.draw()[5]
    assert here.select(wanted, prompts.mask())[2].tolist() == [5] * 8
    assert here.select(wanted, prompts.mask()) is None
    assert scan.name.startswith("scan, torch ")
