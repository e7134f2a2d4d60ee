"""Pipes whose other end is killed, stopped, slow or hostile: whole tensors in order, or an error; never a wrong one."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
from contextlib import suppress

import pytest

import pdkv
from attacks.far import until
from attacks.test_stop import PATIENT, impatient
from patience import follows_the_machine
from pdkv.pipe import BrokenPipeException

SMALL, LARGE = 128, 512 << 10  # words: 1 KiB in the stream, 4 MiB by the transport
SEED = 7


def connect(one, other):
    one.do("connect", other.address)
    other.do("connect", one.address)
    return one.do("pipe"), other.do("pipe")


def ends(start, transport, **settings):
    sender = start("sender", transport, **settings)
    receiver = start("receiver", transport, **settings)
    connect(sender, receiver)
    return sender, receiver


def works(sender, receiver, words=LARGE):
    """A new pair of processes, or the old one, moves what it should."""
    sender.post("send", -1, SEED, 0, 3, words)
    assert receiver.do("receive", -1, SEED, 0, 3, words) == {"came": 3, "wrong": 0, "error": None}
    assert sender.result()["error"] is None


@pytest.mark.parametrize("words", [SMALL, LARGE])
def test_killed_sender(start, transport, words):
    sender, receiver = ends(start, transport)
    sender.post("send", 0, SEED, 0, 100_000, words)
    assert receiver.do("receive", 0, SEED, 0, 5, words)["came"] == 5
    receiver.post("receive", 0, SEED, 5, 100_000, words)
    sender.kill()
    told = receiver.result()
    assert (told["wrong"], type(told["error"])) == (0, BrokenPipeException)
    receiver.do("drop_pipes")
    heir = start("heir", transport)
    connect(heir, receiver)
    works(heir, receiver)


@pytest.mark.parametrize("words", [SMALL, LARGE])
def test_killed_receiver(start, transport, words):
    sender, receiver = ends(start, transport)
    sender.post("send", 0, SEED, 0, 1_000_000, words)
    assert receiver.do("receive", 0, SEED, 0, 5, words)["came"] == 5
    receiver.kill()
    told = sender.result()
    assert type(told["error"]) is BrokenPipeException
    assert "Connection closed by peer" in told["error"].message
    sender.do("drop_pipes")
    heir = start("heir", transport)
    connect(sender, heir)
    works(sender, heir)


def test_stopped_receiver_holds_the_sender_back(start, transport):
    """What waits at the sender is bounded, and what was sent arrives when the receiver goes on."""
    sender, receiver = start("sender", transport, **PATIENT), start("receiver", transport, **PATIENT)
    sender.do("connect", receiver.address)
    receiver.do("connect", sender.address)
    limit = 4 * LARGE * 8
    sender.do("pipe", buffer_bytes=limit)
    receiver.do("pipe")
    receiver.stop()
    told = sender.do("send", 0, SEED, 0, 100, LARGE, timeout_s=1.0)
    assert isinstance(told["error"], pdkv.TransferTimeoutError)
    assert 0 < told["sent"] < 10
    assert told["queued"] <= limit + LARGE * 8  # the one that went beyond it
    receiver.go_on()
    count = told["sent"]
    assert receiver.do("receive", 0, SEED, 0, count, LARGE) == {"came": count, "wrong": 0, "error": None}
    works(sender, receiver)


def test_stopped_sender_loses_nothing_within_the_timeout(start, transport):
    sender, receiver = ends(start, transport, **PATIENT)
    sender.post("send", 0, SEED, 0, 40, LARGE)
    assert receiver.do("receive", 0, SEED, 0, 3, LARGE)["came"] == 3
    sender.stop()
    # What had arrived comes, and then a timeout that may be tried again.
    told = receiver.do("receive", 0, SEED, 3, 37, LARGE, timeout_s=0.5)
    assert isinstance(told["error"], pdkv.TransferTimeoutError)
    sender.go_on()
    rest = receiver.do("receive", 0, SEED, 3 + told["came"], 37 - told["came"], LARGE)
    assert rest == {"came": 37 - told["came"], "wrong": 0, "error": None}
    assert told["wrong"] == 0
    assert sender.result()["error"] is None


@follows_the_machine
def test_a_lost_sender_that_goes_on_writes_into_nobodys_tensors(start, transport, rounds, patience_s):
    """The memory it was given is not given to another pipe, however late it goes on writing."""
    for _ in range(rounds(2)):
        sender = start("sender", transport, **PATIENT)
        receiver = start("receiver", transport, **impatient(patience_s))
        connect(sender, receiver)
        other = start("other", transport)
        sender.post("send", 0, SEED, 0, 100_000, LARGE)
        assert receiver.do("receive", 0, SEED, 0, 3, LARGE)["came"] == 3
        receiver.post("receive", 0, SEED, 3, 100_000, LARGE)
        sender.stop()
        told = receiver.result()
        assert (told["wrong"], type(told["error"])) == (0, BrokenPipeException)
        connect(other, receiver)
        other.post("send", -1, SEED + 1, 0, 24, LARGE)
        told = receiver.do("receive", -1, SEED + 1, 0, 24, LARGE, keep=24)
        assert told == {"came": 24, "wrong": 0, "error": None}
        assert other.result()["error"] is None
        sender.go_on()
        assert isinstance(sender.result()["error"], pdkv.PdkvError)
        assert receiver.do("kept_wrong", SEED + 1, 23) == 0
        for far in (sender, receiver, other):
            far.kill()


def test_both_directions_under_load_and_many_pipes(start, transport):
    left, right = ends(start, transport)
    for end in (left, right):
        end.do("pipe", channel="second")
    for pipe in (0, 1):
        for end, seed in ((left, 1), (right, 2)):
            end.post("exchange", pipe, seed, 3 - seed, 8, LARGE)
        for end in (left, right):
            assert end.result() == {"came": 8, "wrong": 0, "error": None}


class Gadget:
    """What becomes a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_pickle_is_bytes_like_any_others(start, tmp_path):
    """Sent to the port, as a hello, within a frame, and as a tensor's bytes and tag: nobody unpickles it."""
    mark = tmp_path / "unpickled"
    gadget = pickle.dumps(Gadget(mark))
    sender, receiver = ends(start, "tcp")
    host, _, port = receiver.address.rpartition(":")
    dice = random.Random(5)
    for body in (gadget, struct.pack("<I", len(gadget)) + gadget, gadget * 50, dice.randbytes(40) + gadget):
        with socket.create_connection((host, int(port)), timeout=240) as stream, suppress(ConnectionError):
            stream.sendall(body)
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(1 << 16):
                pass
    for raw in (gadget, gadget * 2000):
        sender.post("send_bytes", 0, raw)
        assert receiver.do("receive_bytes", 0) == raw
        sender.result()
    assert not mark.exists()
    works(sender, receiver)
    pickle.loads(gadget)
    assert mark.is_dir()  # it would have worked


def test_memory_and_descriptors_stay_small_however_many_pipes_there_were(start):
    sender, receiver = ends(start, "shm")
    works(sender, receiver, SMALL)
    for end in (sender, receiver):
        end.do("drop_pipes")
    before = [end.do("resources") for end in (sender, receiver)]
    for _ in range(20):
        for end in (sender, receiver):
            end.do("pipe")
        works(sender, receiver)
        for end in (sender, receiver):
            end.do("drop_pipes")

    def settled():
        now = [end.do("resources") for end in (sender, receiver)]
        return all(
            new["fds"] <= old["fds"] + 4
            and new["threads"] <= old["threads"] + 2
            and new["mappings"] <= old["mappings"] + 2
            for old, new in zip(before, now, strict=True)
        )

    until(settled, "the end of what the pipes held")


def test_an_idle_pipe_takes_less_than_a_mebibyte(start):
    sender, receiver = ends(start, "shm")
    works(sender, receiver, SMALL)
    before = [end.do("resources")["rss_kib"] for end in (sender, receiver)]
    for number in range(30):
        for end in (sender, receiver):
            end.do("pipe", channel=f"idle-{number}")
        works(sender, receiver, SMALL)
    for end, kib in zip((sender, receiver), before, strict=True):
        assert end.do("resources")["rss_kib"] - kib < 30 << 10
