"""Transfers over `ucx` from Python: which way they go, what the policies do, and what a missing UCX is."""

from __future__ import annotations

import ctypes.util
import os
from pathlib import Path

import numpy as np
import pytest

import pdkv
from pdkv import wheels

if not (ctypes.util.find_library("ucp") or wheels.folders()) and os.environ.get("PDKV_UCX_REQUIRED") != "1":
    pytest.skip("no UCX here: `make ucx` installs some", allow_module_level=True)

BLOCKS, TOKENS, CONTENT = 32, 16, 64
OVER_SOCKETS = {"TLS": "tcp"}


class Pair:
    """Two engines that have nothing but `ucx` between them, and a KV cache each."""

    def __init__(self, producer=None, consumer=None):
        default = pdkv.UcxConfig(settings=OVER_SOCKETS)
        self.producer = pdkv.Engine("producer", transports=["ucx"], ucx=producer or default)
        self.consumer = pdkv.Engine("consumer", transports=["ucx"], ucx=consumer or producer or default)
        shape = (2, BLOCKS, 1, TOKENS, CONTENT)
        self.source = np.random.default_rng(7).integers(0, 60000, shape, np.uint16)
        self.target = np.zeros(shape, np.uint16)
        engines = [(self.producer, self.source), (self.consumer, self.target)]
        self.caches = [
            engine.register_kv_cache(kv, layout="LBHNC", block_tokens=TOKENS, model="m") for engine, kv in engines
        ]

    def __enter__(self):
        self.peer = self.consumer.connect(self.producer.address, timeout_s=60)
        return self

    def __exit__(self, *_):
        self.consumer.close()
        self.producer.close()

    def pull(self, blocks, into, **options):
        export = self.caches[0].export(blocks)
        transfer = self.caches[1].pull(export.reference, into, **options)
        transfer.wait(60)
        assert (self.target[:, into] == self.source[:, blocks]).all()
        return transfer

    @property
    def why(self):
        return {name: (usable, why) for name, usable, why in self.peer.links()}["ucx"]


def test_active_messages_unless_rdma():
    with Pair() as pair:
        transfer = pair.pull([3, 1, 2, 30], [9, 8, 17, 5], require="ucx")
        assert (transfer.path, transfer.path.rdma) == ("ucx", False)
        assert "active messages over tcp/" in transfer.path.detail
        assert transfer.stats.bytes == 4 * 2 * TOKENS * CONTENT * 2
        with pytest.raises(pdkv.UnsupportedError, match="ucx: not RDMA"):
            pair.pull([1], [1], require="rdma")
        with pytest.raises(pdkv.UnsupportedError, match="ucx: not direct"):
            pair.pull([1], [1], require_direct=True)


def test_a_push_too():
    with Pair() as pair:
        offer = pair.caches[0].offer([4, 9])
        transfer = pair.caches[1].push(offer.reference, [20, 21], require="ucx")
        transfer.wait(60)
        assert (pair.source[:, [4, 9]] == 0).all()


@pytest.mark.parametrize("theirs", ["rdma", "kernel", "never"])
def test_both_ends_must_allow_put_and_get(theirs):
    any_way = pdkv.UcxConfig(one_sided="any", settings=OVER_SOCKETS)
    with Pair(any_way) as pair:
        transfer = pair.pull([5, 6], [1, 30])
        assert "put/get over tcp/" in transfer.path.detail
        assert transfer.stats.staged_bytes == 0
    with Pair(pdkv.UcxConfig(one_sided=theirs, settings=OVER_SOCKETS), any_way) as pair:
        assert "active messages" in pair.pull([5, 6], [1, 30]).path.detail


def test_no_such_library_is_a_reason_and_no_error_of_connecting():
    missing = pdkv.UcxConfig(library="/nowhere/libucp.so.0")
    with Pair(missing) as pair:
        usable, why = pair.why
        assert not usable
        assert "/nowhere/libucp.so.0" in why
        with pytest.raises(pdkv.UnsupportedError, match="/nowhere/libucp"):
            pair.pull([1], [1])


def test_unasked_an_engine_leaves_ucx_alone_without_rdma():
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this host has RDMA devices")
    with pdkv.Engine("a") as a, pdkv.Engine("b") as b:
        reason = {name: why for name, _, why in b.connect(a.address).links()}["ucx"]
        assert "no RDMA device" in reason


def test_settings_that_ucx_refuses_are_a_reason():
    with Pair(pdkv.UcxConfig(settings={"TLS": "carrier_pigeon"})) as pair:
        usable, why = pair.why
        assert not usable
        assert "carrier_pigeon" in why or "no transport" in why.lower(), why
