"""A peer in another process that is killed, stopped or restarted: every transfer ends, and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

import pdkv
from patience import follows_the_machine
from places import host_of_its_own

PEER = """
import sys
import numpy as np
import pdkv

kind, listen = sys.argv[1:]
engine = pdkv.Engine("peer", listen=listen)
owner = engine.allocate(1 << 22, huge_pages=False) if kind == "pool" else np.empty(1 << 22, np.uint8)
memory = np.frombuffer(owner, np.uint8).reshape(4, 64, 1, 16, 1024)
memory[:] = 7
cache = engine.register_kv_cache(memory, layout="LBHNC", block_tokens=16)
export = cache.export(range(64), consumers=100, lease_s=600)
region = engine.register(memory)
print(export.reference.to_json())
print(region.describe().to_json(), flush=True)
sys.stdin.read()
"""


@contextmanager
def peer(kind="pool", listen="127.0.0.1:0"):
    command = [sys.executable, "-c", PEER, kind, listen]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            child.reference = pdkv.Reference.from_json(child.stdout.readline())
            child.region = pdkv.RegionDescriptor.from_json(child.stdout.readline())
            yield child
        finally:
            child.kill()


@pytest.fixture
def engine():
    with pdkv.Engine("here", listen=None, heartbeat_s=0.1, peer_timeout_s=60) as engine:
        yield engine


def stop(child):
    """Stops every thread of the peer, and returns when they have stopped."""
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)


def cache_of(engine):
    memory = np.frombuffer(engine.allocate(1 << 22, huge_pages=False), np.uint8).reshape(4, 64, 1, 16, 1024)
    return memory, engine.register_kv_cache(memory, layout="LBHNC", block_tokens=16)


@pytest.mark.parametrize(("kind", "transport"), [("pool", "shm"), ("private", "cma"), ("private", "tcp")])
def test_pull_and_read(engine, kind, transport):
    memory, cache = cache_of(engine)
    with peer(kind) as child:
        to = engine.connect(child.reference.address)
        transfer = cache.pull(child.reference, into=range(64), require=transport, require_direct=True)
        transfer.wait(60)
        assert transfer.path == transport
        assert (memory == 7).all()
        target = engine.register(np.zeros(4096, np.uint8))
        transfer = to.read(target, child.region.span(8192, 4096), require=transport)
        transfer.wait(60)
        assert transfer.path == transport
        assert (target.tensor == 7).all()


def test_the_best_way_is_taken_and_the_others_explained(engine):
    _, cache = cache_of(engine)
    with peer("private") as child:
        engine.connect(child.reference.address)
        transfer = cache.pull(child.reference, into=range(64))
        transfer.wait(60)
        assert transfer.path == "cma"
        assert any("shm" in reason for reason in transfer.path.reasons)
        with pytest.raises(pdkv.UnsupportedError, match="shm"):
            cache.pull(child.reference, into=range(64), require="shm").wait(60)


def test_a_killed_peer_ends_the_transfer(engine):
    _, cache = cache_of(engine)
    with peer() as child:
        engine.connect(child.reference.address)
        stop(child)
        transfer = cache.pull(child.reference, into=range(64), timeout_s=60)
        assert not transfer.poll()
        child.kill()
        with pytest.raises(pdkv.PeerLostError):
            transfer.wait(60)
        assert transfer.destination in ("untouched", "invalid")
        assert transfer.wait_quiesced(60)


def test_a_stopped_peer_ends_the_transfer_at_its_deadline(engine):
    _, cache = cache_of(engine)
    with peer() as child:
        engine.connect(child.reference.address)
        stop(child)
        patient = cache.pull(child.reference, into=range(32), timeout_s=600)
        with pytest.raises(pdkv.TransferTimeoutError, match="still"):
            patient.wait(0.01)
        transfer = cache.pull(child.reference, into=range(32, 64), timeout_s=0.3)
        with pytest.raises(TimeoutError):
            transfer.wait(60)
        assert isinstance(transfer.error, pdkv.TransferTimeoutError)
        assert transfer.state == "failed"
        assert transfer.wait_quiesced(60)


@follows_the_machine
def test_a_silent_peer_counts_as_lost(patience_s):
    with pdkv.Engine("impatient", listen=None, heartbeat_s=0.1, peer_timeout_s=patience_s) as engine, peer() as child:
        to = engine.connect(child.reference.address)
        stop(child)
        for _ in range(12000):
            if not to.alive:
                break
            time.sleep(0.01)
        assert not to.alive
        with pytest.raises(pdkv.PeerLostError):
            to.notify(b"are you there")


def test_cancel(engine):
    _, cache = cache_of(engine)
    with peer() as child:
        engine.connect(child.reference.address)
        stop(child)
        transfer = cache.pull(child.reference, into=range(64), timeout_s=60)
        transfer.cancel()
        with pytest.raises(pdkv.TransferCancelledError):
            transfer.wait(60)
        assert transfer.wait_quiesced(60)
        assert (transfer.state, transfer.destination) == ("cancelled", "untouched")


def test_a_restarted_peer_refuses_references_of_its_earlier_life(engine):
    _, cache = cache_of(engine)
    with peer(listen=f"{host_of_its_own()}:0") as first:
        old = first.reference
    with peer(listen=old.address) as second:
        engine.connect(old.address)
        with pytest.raises(pdkv.ReferenceRestartedError):
            cache.pull(old, into=range(64)).wait(60)
        cache.pull(second.reference, into=range(64)).wait(60)


def test_adopted_memory_is_shared_in_place(engine):
    tensor = np.full(1 << 26, 3, np.uint8)  # larger than anything malloc takes from its heap
    address = tensor.ctypes.data
    region = engine.register(tensor, adopt=True)
    assert tensor.ctypes.data == address
    assert (tensor == 3).all()
    with peer() as child:
        to = engine.connect(child.reference.address)
        transfer = to.read(region.span(4096, 4096), child.region.span(0, 4096), require="shm")
        transfer.wait(60)
        assert (tensor[4096:8192] == 7).all()


def test_adoption_is_refused_with_a_reason(engine, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with pytest.raises(pdkv.UnsupportedError) as caught:
        engine.register(np.memmap(path, np.uint8, mode="r+"), adopt=True)
    assert caught.value.hint
