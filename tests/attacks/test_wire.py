"""Bytes from nobody: garbage, broken frames, foreign protocols, floods of connections, and no descriptor left."""

from __future__ import annotations

import random
import resource
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import chance
import pdkv
from attacks.far import until

GOLDEN = Path(__file__).resolve().parents[2] / "rust/pdkv-core/tests/golden"
BLOCKS = list(range(32))
SAME = [(block, block) for block in BLOCKS]
SIZE = {"layers": 4, "blocks": 32, "block_bytes": 32 << 10}


def golden(name):
    """The bytes of one message as every release writes them."""
    lines = (GOLDEN / f"{name}.hex").read_text().splitlines()
    return bytes.fromhex("".join(line.partition("#")[0] for line in lines))


def call(address):
    """A plain connection."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=240)


def pair(start, transport, **settings):
    consumer = start("consumer", transport, **SIZE, **settings)
    producer = start("producer", transport, seed=1, **SIZE, **settings)
    consumer.do("connect", producer.address)
    _, reference = producer.do("export", BLOCKS, consumers=10_000, lease_s=600)
    return producer, consumer, reference


def mutated(dice, frames):
    """A frame with something wrong with it: bits, length, end, or all of it."""
    frame = bytearray(dice.choice(frames))
    match dice.randrange(5):
        case 0:
            for _ in range(dice.randrange(1, 8)):
                frame[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
        case 1:
            frame[:4] = dice.randrange(1 << 32).to_bytes(4, "little")
        case 2:
            del frame[dice.randrange(len(frame)) :]
        case 3:
            body = dice.randbytes(dice.randrange(200))
            frame = bytearray(len(body).to_bytes(4, "little") + body)
        case _:
            frame = bytearray(dice.randbytes(dice.randrange(1, 300)))
    return bytes(frame)


def test_broken_frames_during_transfers(start, transport, rounds):
    producer, consumer, reference = pair(start, transport)
    seed = chance.seed()
    print("seed", seed)  # noqa: T201 - shown when the test fails
    dice = random.Random(seed)
    frames = [golden(path.stem) for path in sorted(GOLDEN.glob("*.hex"))]
    hello = golden("hello")
    consumer.post("pull_again_and_again", reference, SAME, 1, 30)
    sent = 0
    while sent < rounds(2500):  # over four transports
        with call(producer.address) as stream, suppress(ConnectionError):
            if dice.randrange(2):  # one that is a peer before it goes astray
                stream.sendall(hello)
            for _ in range(20):
                sent += 1
                stream.sendall(mutated(dice, frames))
            if dice.randrange(8) == 0:
                with suppress(OSError):  # it has hung up before
                    stream.shutdown(socket.SHUT_WR)
                while stream.recv(1 << 16):
                    pass
    assert consumer.result() == 30
    until(lambda: producer.do("peer_names") == ["consumer"], "the end of the strangers")
    assert producer.do("stats")["live_claims"] == 0
    assert consumer.do("try_pull", reference, BLOCKS)["state"] == "done"


def test_http_is_hung_up_on(start):
    producer, consumer, reference = pair(start, "tcp")
    with call(producer.address) as stream:
        stream.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n")
        with suppress(ConnectionResetError):
            assert stream.recv(1 << 16) == b""
    assert consumer.do("try_pull", reference, BLOCKS)["state"] == "done"


def test_a_babbling_peer_does_not_drown_the_others(start, transport):
    """Somebody who sends without end gets its turns, and everybody else theirs."""
    producer, consumer, reference = pair(start, transport)
    pings = golden("ping") * 20_000
    over = threading.Event()

    def babble(stream):
        stream.sendall(golden("hello"))
        while not over.is_set():
            stream.sendall(pings)

    def listen(stream):
        while stream.recv(1 << 20):
            pass

    with ExitStack() as stack:
        threads = []
        for _ in range(2):
            stream = stack.enter_context(call(producer.address))
            for body in (babble, listen):
                thread = threading.Thread(target=quietly, args=(body, stream))
                thread.start()
                threads.append(thread)
        until(lambda: len(producer.do("peer_names")) == 3, "the babblers")
        assert consumer.do("pull_again_and_again", reference, SAME, 1, 10) == 10
        other = start("other", transport, **SIZE)
        other.do("connect", producer.address)
        assert other.do("try_pull", reference, BLOCKS)["state"] == "done"
        over.set()
        for thread in threads[::2]:
            thread.join(60)
    for thread in threads[1::2]:
        thread.join(60)


def quietly(body, stream):
    with suppress(OSError):
        body(stream)


def test_idle_connections_do_not_keep_others_out(start, transport):
    producer, consumer, reference = pair(start, transport)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1500:
        pytest.skip(f"this system allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    try:
        with ExitStack() as stack:
            idle = [stack.enter_context(call(producer.address)) for _ in range(1000)]
            # One that was there before, which may need more streams now, and one that comes now.
            assert consumer.do("try_pull", reference, BLOCKS)["state"] == "done"
            other = start("other", transport, **SIZE)
            other.do("connect", producer.address)
            assert other.do("try_pull", reference, BLOCKS)["state"] == "done"
            assert other.do("wrong", 1, SAME) == []
            # They are not kept for ever.
            for stream in idle if transport == "tcp" else ():
                with suppress(ConnectionResetError):
                    assert stream.recv(1) == b""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("side", ["consumer", "producer"])
def test_no_descriptor_left(start, transport, side):
    producer, consumer, reference = pair(start, transport)
    poor = {"consumer": consumer, "producer": producer}[side]
    for spare in range(6):
        poor.do("limit_descriptors", spare)
        # An owner that can't take a connection at all leaves it waiting, and the deadline ends the transfer.
        typed = (pdkv.CapacityError, pdkv.PeerError, pdkv.TransferTimeoutError)
        outcome = consumer.do("try_pull", reference, BLOCKS, timeout_s=0.5)
        if outcome["state"] != "done":
            # Where a lane is the only way and none can be made, there is no way, and the error names the cause.
            assert isinstance(outcome["error"], (*typed, pdkv.UnsupportedError)), outcome
            assert outcome["quiesced"]
        with suppress(*typed):
            consumer.do("reconnect", producer.address, 1, 0.5)
    poor.do("free_descriptors")
    # Whoever waited in the queue of the listener is let in now, with nobody else knocking.
    consumer.do("connect", producer.address)
    outcome = consumer.do("try_pull", reference, BLOCKS)
    assert outcome["state"] == "done", outcome
    assert consumer.do("wrong", 1, SAME) == []


def test_who_waits_for_a_descriptor_is_let_in(start):
    producer, consumer, reference = pair(start, "tcp")
    assert consumer.do("try_pull", reference, BLOCKS)["state"] == "done"
    other = start("other", "tcp", **SIZE)
    for _ in range(20):  # what the transfer before held is let go of a little later, and taken too
        producer.do("limit_descriptors", 0)
        time.sleep(0.02)
    other.post("connect", producer.address, 60.0)
    with pytest.raises(AssertionError, match="hangs"):
        other.result(1.0)
    producer.do("free_descriptors")
    other.result()
    assert other.do("try_pull", reference, BLOCKS)["state"] == "done"
