"""What is left when consumers come and go, and when a process ends without closing anything."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pdkv
from lookup.far import PATIENCE_S, until
from pdkv.lookup_buffer import LookupBuffer
from pdkv.lookup_buffer.link import Door


def held():
    """Open descriptors and threads of this process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("same_engine", [True, False])
def test_consumers_that_come_and_go_leave_nothing_behind(same_engine):
    with pdkv.Engine("producer") as engine, LookupBuffer(engine) as producer, pdkv.Engine("consumer") as other:
        peer = other.connect(engine.address, timeout_s=PATIENCE_S)

        def visit(consumer_engine, peer):
            with LookupBuffer(consumer_engine, peer, library="numpy") as consumer:
                producer.insert(np.arange(4), None, np.zeros(50_000), None, None)
                assert consumer.drop_select(np.arange(4), timeout_s=PATIENCE_S)[2].shape == (50_000,)

        def turn():
            if same_engine:
                visit(other, peer)
                return
            with pdkv.Engine("visitor") as visitor:
                visit(visitor, visitor.connect(engine.address, timeout_s=PATIENCE_S))

        for _ in range(3):
            turn()
        until(lambda: not producer._sessions, "the end of the sessions")
        before = held()
        for _ in range(15):
            turn()
        # A few may be on their way out; something left by each of the turns is more.
        until(lambda: all(now <= then + 5 for now, then in zip(held(), before, strict=True)), f"as few as {before}")
        until(lambda: producer.used_bytes == 0, "the word that the last one has taken it")


class Crowd:
    """An engine to which somebody comes at any time and leaves at once."""

    def accept_pipe(self, channel, timeout_s):
        return self

    def recv(self, timeout_s):
        raise pdkv.PeerLostError("gone already")

    peer = "somebody"

    def close(self):
        pass


def test_a_door_closes_whoever_comes_at_that_moment():
    for _ in range(30):
        door = Door(Crowd(), "buffer/x", lambda pipe, name: None, buffer_bytes=1)
        door.close()
        assert door.join(PATIENCE_S)


EXIT = """
import sys, threading
import numpy as np
import pdkv
from pdkv.lookup_buffer import KVStore, LookupBuffer
one, two = pdkv.Engine("one"), pdkv.Engine("two")
producer, store = LookupBuffer(one), KVStore(one)
consumer = LookupBuffer(two, two.connect(one.address), library="numpy")
producer.insert(np.arange(4), None, np.zeros(3), None, None)
selection = consumer.select(np.array([9]))
threading.Thread(target=consumer.drop_select, args=(np.array([10]),), daemon=True).start()
print(consumer.drop_select(np.arange(3))[0].tolist())
"""


def test_a_process_that_closes_nothing_ends_well():
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "[0, 1, 2, 3]\n"), done.stderr


STORM = """
import random, signal
import numpy as np
import pdkv
from pdkv.lookup_buffer import LookupBuffer


class Stop(Exception):
    pass


armed = False


def stop(*_):
    if armed:
        raise Stop


signal.signal(signal.SIGALRM, stop)
random.seed(5)
buffer = LookupBuffer(max_bytes=100_000)


def stormy(call):
    "Calls, and interrupts the call at some moment."
    global armed
    signal.setitimer(signal.ITIMER_REAL, random.random() * 300e-6 + 1e-6)
    try:
        armed = True
        try:
            return call()
        finally:
            armed = False
    except (Stop, pdkv.TransferTimeoutError):
        return None


got = 0
for number in range(1500):
    stormy(lambda: buffer.insert(np.array([number % 7, 1]), None, np.zeros(3), None, None, timeout_s=0.01))
    if number % 3 == 0:
        got += stormy(lambda: buffer.drop_select(np.array([number % 5]), timeout_s=0.001)) is not None
shelf = buffer._shelves[False]
inside = list(shelf._entries.values())
assert len(inside) > 100 and got > 50, (len(inside), got)
counted = buffer.used_bytes == sum(entry.nbytes for entry in inside)
print(len(buffer) == len(inside), counted, len(shelf._waiting), len(buffer._room._queue))
buffer.insert(np.array([99]), None, None, None, None)
print(buffer.drop_select(np.array([99]), timeout_s=60)[0].tolist())
"""


def test_interrupts_at_any_moment_leave_the_buffer_whole():
    done = subprocess.run([sys.executable, "-c", STORM], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "True True 0 0\n[99]\n"), done.stderr
