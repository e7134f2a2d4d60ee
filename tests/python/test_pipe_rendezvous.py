"""How the two ends of a `PdkvPipe` find each other, and who else may come by."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

import pdkv
from pdkv.pipe import PdkvPipe
from places import host_of_its_own

WAIT_S = 60.0
HOST = host_of_its_own()


def same(came, sent):
    assert came.dtype == sent.dtype
    assert np.array_equal(came, sent)


def drop_in(rank, port, **settings):
    config = {
        "kv_connector": "PyNcclConnector",
        "kv_role": "kv_both",
        "kv_rank": rank,
        "kv_parallel_size": 2,
        "kv_ip": HOST,
    }
    extra = {"store_timeout": WAIT_S}
    return PdkvPipe(0, {**config, "kv_port": port, "kv_connector_extra_config": extra, **settings}, device="cpu")


def meet(port, one=None, other=None):
    """Makes both ends at once; returns what came of each."""
    outcome: list[object] = [None, None]

    def make(rank, settings):
        try:
            outcome[rank] = drop_in(rank, port, **(settings or {}))
        except pdkv.PdkvError as error:
            outcome[rank] = error

    threads = [threading.Thread(target=make, args=(rank, settings)) for rank, settings in enumerate((one, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    return outcome


@pytest.fixture
def port():
    with pdkv.Engine("looks for a port", listen=f"{HOST}:0") as engine:
        return int(engine.address.rsplit(":", 1)[1])


def test_drop_in(port):
    producer, consumer = meet(port)
    try:
        producer.send_tensor(np.arange(1 << 20))
        same(consumer.recv_tensor(WAIT_S), np.arange(1 << 20))
        consumer.send_tensor(None)
        assert producer.recv_tensor(WAIT_S) is None
        assert producer.device == "cpu"
    finally:
        consumer.close()
        producer.close()
    # The place is free again.
    producer, consumer = meet(port)
    producer.abort()
    consumer.abort()


@pytest.mark.parametrize(
    "settings", [{"kv_parallel_size": 3}, {"kv_parallel_size": 1}, {"kv_rank": 2}, {"kv_rank": None}]
)
def test_what_is_not_one_of_two(port, settings):
    with pytest.raises(pdkv.ConfigError, match="kv_rank"):
        drop_in(1, port, **settings)


def test_rank_1_learns_what_it_disagrees_about(port):
    with pdkv.Engine("four of them", listen=f"{HOST}:{port}") as other:
        raised: list[pdkv.PdkvError] = []

        def come():
            with pytest.raises(pdkv.ConfigError) as error:
                drop_in(1, port)
            raised.append(error.value)

        thread = threading.Thread(target=come)
        thread.start()
        receiver = other.accept_pipe(f"meet:{port}".encode(), timeout_s=WAIT_S)
        greeting = json.loads(receiver.recv(WAIT_S)[0][1:])
        greet(other.connect(greeting["address"]), port, rank=0, kv_parallel_size=4, address=other.address)
        thread.join(2 * WAIT_S)
    assert "`kv_parallel_size` is `4` there, `2` was expected" in str(raised[0])


def test_nobody_comes(port):
    extra = {"kv_connector_extra_config": {"store_timeout": 0.3}}
    for rank, word in ((0, "rank 1 did not come"), (1, "rank 0 does not listen")):
        with pytest.raises(pdkv.PeerUnreachableError, match=word):
            drop_in(rank, port, **extra)


def knock(engine, port):
    """Connects to a rank 0 that may not listen yet."""
    while True:
        try:
            return engine.connect(f"{HOST}:{port}")
        except pdkv.PeerUnreachableError:
            time.sleep(0.01)


def greet(peer, port, **fields):
    words = json.dumps({"version": 1, "rank": 1, "kv_parallel_size": 2, **fields}).encode()
    say(peer, port, b"g" + words)


def say(peer, port, words):
    sender = peer.open_pipe(f"meet:{port}".encode())
    sender.send(words, None, (), (), 0, 0, None, WAIT_S)
    sender.close(WAIT_S)


def test_strangers_do_not_keep_rank_1_out(port, monkeypatch):
    monkeypatch.setattr("pdkv.pipe.rendezvous._MANNERS_S", 8.0)
    outcome: list[object] = []
    thread = threading.Thread(target=lambda: outcome.append(drop_in(0, port)))
    thread.start()
    with pdkv.Engine("stranger") as stranger, pdkv.Engine("bystander") as bystander:
        peer = knock(stranger, port)
        silent = peer.open_pipe(f"meet:{port}".encode())
        deep = b"g" + b"[" * 60_000
        for words in (b"", b"g{", b'g{"address": 3}', b"g[]", deep, b'g{"address": "\\ud800:1"}', b"g\xff"):
            say(peer, port, words)
        greet(peer, port, address=":")
        # Somebody else's address; its own, with other settings; and a perfect one that then hears nothing.
        greet(peer, port, address=bystander.address)
        greet(peer, port, address=stranger.address, kv_parallel_size=4)
        greet(peer, port, address=stranger.address, rank=0)
        greet(peer, port, address=stranger.address)
        consumer = drop_in(1, port)
        thread.join(2 * WAIT_S)
        consumer.send_tensor(np.arange(4))
        same(outcome[0].recv_tensor(WAIT_S), np.arange(4))
        consumer.abort()
        outcome[0].abort()
        silent.abort()
