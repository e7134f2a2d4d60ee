"""Waiting leaves the interpreter to others, hears Ctrl-C, and every object may be used from any thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pdkv
from pdkv.testing import connected_pair


def stuck(engine):
    """An export that nobody pulls: waiting for it ends by timeout only."""
    cache = engine.register_kv_cache({"a": np.zeros((8, 1, 16, 8), np.uint8)}, layout="BHNC", block_tokens=16)
    return cache.export([1], lease_s=600)


@pytest.fixture
def engine():
    with pdkv.Engine("waiter", listen=None) as engine:
        yield engine


def test_a_wait_leaves_the_interpreter_to_other_threads(engine):
    export = stuck(engine)
    waiting = threading.Thread(target=export.wait, args=(600,))
    waiting.start()
    # Were the interpreter held, this thread would not get here before the lease ended.
    assert sum(range(100_000)) == 4_999_950_000
    assert waiting.is_alive()
    export.release()
    waiting.join(60)
    assert not waiting.is_alive()


def test_waits_time_out(engine):
    export = stuck(engine)
    for seconds in (0, 0.01):
        # Nothing that is returned could be taken for an end.
        with pytest.raises(pdkv.TransferTimeoutError, match="still `active`") as caught:
            export.wait(seconds)
        assert "release()" in caught.value.hint
    for bad in (-1, float("nan"), 1e30):
        with pytest.raises(pdkv.ConfigError, match="timeout_s"):
            export.wait(bad)


@pytest.mark.parametrize("wait", ["export.wait()", "export.wait_quiesced()"])
def test_ctrl_c_is_heard(wait):
    script = f"""
import sys, numpy as np, pdkv
engine = pdkv.Engine("a")
cache = engine.register_kv_cache({{"a": np.zeros((8, 1, 16, 8), np.uint8)}}, layout="BHNC", block_tokens=16)
export = cache.{"export" if wait == "export.wait()" else "offer"}([1], lease_s=600)
try:
    print("ready", flush=True)
    {wait}
except KeyboardInterrupt:
    print("heard")
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.1)
        os.kill(child.pid, signal.SIGINT)
        assert child.communicate(timeout=240)[0] == "heard\n"
        assert child.returncode == 0


def test_ctrl_c_is_heard_while_connecting():
    script = """
import socket, pdkv
silent = socket.create_server(("127.0.0.1", 0))
engine = pdkv.Engine("a", listen=None)
try:
    print("ready", flush=True)
    engine.connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=300)
except KeyboardInterrupt:
    print("heard")
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.1)
        os.kill(child.pid, signal.SIGINT)
        assert child.communicate(timeout=240)[0] == "heard\n"
        assert child.returncode == 0


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_many_threads_share_everything(transport):
    blocks, layers = 64, 2
    with pdkv.Engine("a", transports=[transport]) as producer, pdkv.Engine("b", transports=[transport]) as consumer:
        kv = [np.zeros((layers, blocks, 1, 16, 64), np.uint8) for _ in range(2)]
        kv[0][:] = np.random.default_rng(7).integers(0, 256, kv[0].shape)
        theirs, ours = (
            engine.register_kv_cache(memory, layout="LBHNC", block_tokens=16)
            for engine, memory in zip((producer, consumer), kv, strict=True)
        )
        peer = consumer.connect(producer.address)
        issuer, ended = theirs.issuer(), []

        def work(thread):
            ids = np.arange(thread, blocks, 8)
            for turn in range(20):
                ids = np.roll(ids, turn)
                reference = issuer.issue(num_blocks=len(ids), num_tokens=len(ids) * 16)
                if turn % 2:
                    theirs.export(ids, reference=reference)
                transfer = ours.pull(reference.to_json(), into=ids)
                if not turn % 2:
                    theirs.export(ids, reference=reference)
                transfer.wait(60)
                ended.extend(producer.take_ended())
                repr(transfer), dict(transfer.stats), str(transfer.path), consumer.stats
                peer.notify(f"{thread}".encode())
                producer.notifications()

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
        assert (kv[1] == kv[0]).all()
        assert producer.stats["live_exports"] == 0
        assert len(ended) == len(set(ended)) == 8 * 20


def test_closing_from_another_thread_ends_a_wait():
    with connected_pair() as pair:
        export = stuck(pair.producer)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(export.wait, 60)
            pair.producer.close()
            assert waiting.result(60) != "active"
