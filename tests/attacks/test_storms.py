"""Many cancels, many connections, many forks: what is held before is held after."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

import pytest

import pdkv
from attacks.far import until
from patience import follows_the_machine

BLOCKS = list(range(32))
SAME = [(block, block) for block in BLOCKS]
SLACK_KIB = 24 << 10
SLACK = {"fds": 0, "mappings": 0, "threads": 4}  # idle threads wait for more work, and end in their own time
STREAMS = 10  # of `tcp` are kept for what comes next, each a thread at the owner; how many there are is chance


def flat(before, far, transport=""):
    """Waits until a process holds no more than before."""
    if transport.startswith("ucx"):
        # What woke the thread of a lane that is gone is let go when the next lane is made.
        before = {**before, "fds": before["fds"] + 1}
    if transport in ("tcp", "unix"):
        before = {**before, "fds": before["fds"] + STREAMS, "threads": before["threads"] + STREAMS}
    deadline = time.monotonic() + 120.0
    while True:
        now = far.do("resources")
        more = {key: (before[key], now[key]) for key, slack in SLACK.items() if now[key] > before[key] + slack}
        if not more:
            break
        assert time.monotonic() < deadline, f"held for good: {more}"
        time.sleep(0.05)
    assert now["rss_kib"] < before["rss_kib"] + SLACK_KIB, (before, now)


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_more_pulls_at_once_than_there_are_streams(start, way):
    # So many bytes that each would take several streams, if nobody else did.
    size = {"layers": 4, "blocks": 32, "block_bytes": 128 << 10}
    consumer = start("consumer", way, **size)
    producer = start("producer", way, seed=1, **size)
    consumer.do("connect", producer.address)
    _, reference = producer.do("export", BLOCKS, consumers=100, lease_s=600)
    assert consumer.do("pulls_at_once", reference, 100, BLOCKS) == {"done": 100}
    assert consumer.do("wrong", 1, SAME) == []


def test_cancels(start, transport, rounds):
    size = {"layers": 4, "blocks": 32, "block_bytes": 16 << 10}
    consumer = start("consumer", transport, **size)
    producer = start("producer", transport, seed=1, **size)
    consumer.do("connect", producer.address)

    def storm(count, seed):
        pins = [producer.do("export", BLOCKS, consumers=50, lease_s=600) for _ in range(1 + count // 25)]
        references = [pins[index % len(pins)][1] for index in range(count)]
        ends = consumer.do("cancel_storm", references, BLOCKS, seed)
        assert set(ends) <= {"cancelled", "done"}
        for number, _ in pins:
            producer.do("release", number)
        return ends

    storm(50, 0)
    held = [(far, far.do("resources")) for far in (consumer, producer)]
    assert storm(rounds(500), 1).get("cancelled")
    until(lambda: producer.do("stats")["live_claims"] == 0, "the end of all claims")
    assert producer.do("stats")["live_exports"] == 0
    assert consumer.do("stats")["live_transfers"] == 0
    for far, before in held:
        flat(before, far, transport)
    _, reference = producer.do("export", BLOCKS)
    assert consumer.do("try_pull", reference, BLOCKS)["state"] == "done"
    assert consumer.do("wrong", 1, SAME) == []


def test_reconnects(start, transport, rounds):
    consumer = start("consumer", transport)
    producer = start("producer", transport, seed=1)
    consumer.do("reconnect", producer.address, 30)
    until(lambda: producer.do("peer_names") == [], "the end of all links")
    held = [(far, far.do("resources")) for far in (consumer, producer)]
    for _ in range(10):
        consumer.do("reconnect", producer.address, rounds(100 if transport in ("shm", "tcp") else 10))
    until(lambda: producer.do("peer_names") == [], "the end of all links")
    for far, before in held:
        flat(before, far, transport)
    consumer.do("connect", producer.address)
    _, reference = producer.do("export", BLOCKS)
    assert consumer.do("try_pull", reference, BLOCKS)["state"] == "done"


def test_forks_under_transfers(start, transport):
    consumer = start("consumer", transport)
    producer = start("producer", transport, seed=1)
    consumer.do("connect", producer.address)
    _, reference = producer.do("export", BLOCKS, consumers=300, lease_s=600)
    for far in (producer, consumer):
        if far is producer:
            consumer.post("pull_again_and_again", reference, SAME, 1, 100)
        for _ in range(5):
            assert far.do("fork") == 0
        if far is producer:
            assert consumer.result() == 100
    assert consumer.do("pull_again_and_again", reference, SAME, 1, 10) == 10


@follows_the_machine
def test_a_child_that_lives_on_does_not_hide_the_death_of_its_parent(start, transport, patience_s):
    consumer = start("consumer", transport, heartbeat_s=0.2, peer_timeout_s=patience_s)
    producer = start("producer", transport, seed=1)
    peer = consumer.do("connect", producer.address)
    child = producer.do("fork", long=True)
    assert child > 0
    _, reference = producer.do("export", BLOCKS)
    producer.kill()
    # The child holds the sockets open, so only silence tells.
    outcome = consumer.do("try_pull", reference, BLOCKS, timeout_s=300.0)
    assert isinstance(outcome["error"], pdkv.PeerError)
    assert outcome["destination"] in ("untouched", "invalid")
    # A lane may tell of the end before the silence does.
    until(lambda: not consumer.do("alive", peer), "the loss of the peer")
    os.kill(child, signal.SIGKILL)


def test_all_who_connected_while_nobody_looked_are_taken_in(start):
    owner = start("owner", "tcp", seed=1)
    host, _, port = owner.address.rpartition(":")
    owner.stop()
    # More than an engine takes in before its other work has its turn, and no event but one for all of them.
    crowd = [socket.create_connection((host, int(port)), timeout=60.0) for _ in range(100)]
    for stranger in crowd:
        stranger.sendall(b"no hello at all" * 10)
    owner.go_on()
    for stranger in crowd:
        with stranger, contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
