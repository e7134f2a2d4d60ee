"""Pipes whose other end is killed, stopped or forked: whoever waits gets a typed error, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import pdkv
from patience import follows_the_machine

MIB = 1 << 20
LARGE = 256 * MIB

CHILD = """
import sys
import numpy as np
import pdkv

role, transport, address = sys.argv[1:]
engine = pdkv.Engine("child", transports=[transport], heartbeat_s=0.1, peer_timeout_s=60)
array = np.ones(int(sys.stdin.readline()), np.uint8)
if role == "receiver":
    print(engine.address, flush=True)
    pipe = engine.accept_pipe(b"pipe", timeout_s=60)
    while True:
        pipe.recv()
        print("received", flush=True)
pipe = engine.connect(address, timeout_s=60).open_pipe(b"pipe", limit_bytes=10 * array.nbytes)
print("opened", flush=True)
while True:
    pipe.send(b"", "uint8", array.shape, (1,), 1, array.__array_interface__["data"][0], array)
"""


@contextmanager
def child(role, transport, address="", nbytes=LARGE):
    command = [sys.executable, "-c", CHILD, role, transport, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdin.write(f"{nbytes}\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()


def here(transport="shm", patience_s=60):
    return pdkv.Engine("here", transports=[transport], heartbeat_s=0.1, peer_timeout_s=patience_s)


@pytest.fixture
def engine():
    with here() as engine:
        yield engine


OVER = pytest.mark.parametrize("transport", ["shm", "cma", "tcp"])


def send(pipe, array, tag=b"", timeout_s=None):
    address = array.__array_interface__["data"][0]
    pipe.send(tag, array.dtype.name, array.shape, (1,), array.itemsize, address, array, timeout_s)


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def until(holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


@OVER
@pytest.mark.parametrize("how", ["killed", "stopped"])
@follows_the_machine
def test_a_receiver_that_ends_within_an_item_is_an_error_of_the_sender(transport, how, patience_s):
    with here(transport, patience_s if how == "stopped" else 60) as engine, child("receiver", transport) as process:
        peer = engine.connect(process.stdout.readline().strip(), timeout_s=60)
        pipe = peer.open_pipe(b"pipe", limit_bytes=LARGE << 10)
        array = np.ones(LARGE, np.uint8)
        send(pipe, array)
        assert process.stdout.readline() == "received\n"
        for _ in range(12):  # more than are received before the blow falls
            send(pipe, array)
        (process.kill if how == "killed" else lambda: stop(process))()
        with pytest.raises(pdkv.PeerLostError):
            pipe.flush(60)
        with pytest.raises(pdkv.PeerLostError):
            send(pipe, array)
        until(lambda: pipe.queued_bytes == 0 and not pipe.alive)
        # Nothing holds the tensor but this test, once a native call has let go of what the pipe's thread gave up.
        until(lambda: not pipe.alive and sys.getrefcount(array) == 2)


def drain(pipe, each_s=60):
    while True:
        pipe.recv(each_s)


@OVER
@pytest.mark.parametrize("how", ["killed", "stopped"])
@follows_the_machine
def test_a_sender_that_ends_within_an_item_is_an_error_of_the_receiver(transport, how, patience_s):
    with here(transport, patience_s if how == "stopped" else 60) as engine:
        with child("sender", transport, engine.address) as process:
            pipe = engine.accept_pipe(b"pipe", timeout_s=60)
            first = pipe.recv(60)[3]
            with pytest.raises(pdkv.TransferTimeoutError):
                # Placed, and hardly there; one that came while this thread could not run is not the one to be met.
                drain(pipe, 0.001)
            (process.kill if how == "killed" else lambda: stop(process))()
            with pytest.raises(pdkv.PeerLostError):
                drain(pipe)
            assert not pipe.alive
            assert np.frombuffer(first, np.uint8)[::4096].all()
            if how == "stopped":
                # It goes on with what it was about to do, into memory that nobody else has by then.
                mine = [np.zeros(8 * MIB, np.uint8) for _ in range(40)]
                os.kill(process.pid, signal.SIGCONT)
                time.sleep(0.5)
                assert not any(array.any() for array in mine)
        # The session is over; the engine is not.
        with child("sender", transport, engine.address, nbytes=MIB) as process:
            assert engine.accept_pipe(b"pipe", timeout_s=60).recv(60)[3].nbytes == MIB


@pytest.fixture
def ends(engine):
    with pdkv.Engine("far") as far:
        sender = engine.connect(far.address, timeout_s=60).open_pipe(b"pipe", limit_bytes=MIB)
        yield sender, far.accept_pipe(b"pipe", timeout_s=60)


INTERRUPTED = """
import signal, sys, threading, time
import numpy as np
import pdkv

near, far = pdkv.Engine("near"), pdkv.Engine("far")
sender = near.connect(far.address, timeout_s=60).open_pipe(b"pipe", limit_bytes=0)
receiver = far.accept_pipe(b"pipe", timeout_s=60)
array = np.ones(1 << 20, np.uint8)

def send():
    sender.send(b"x", "uint8", array.shape, (1,), 1, array.__array_interface__["data"][0], array)

calls = {
    "recv": receiver.recv,
    "accept": lambda: far.accept_pipe(b"never"),
    "send": lambda: [send() for _ in range(100)],
    "flush": sender.flush,
    "close": sender.close,
}
for name, call in calls.items():
    if name == "send":
        send()  # however late this thread may be for the next, which waits
    try:
        threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
        call()
    except KeyboardInterrupt:
        print(name, flush=True)
got = 0
try:
    while True:
        assert np.frombuffer(receiver.recv(60)[3], np.uint8).all()
        got += 1
except pdkv.ClosedError:
    pass
sender.close()
print(got)
"""


def test_an_interrupt_is_heard_wherever_one_waits_and_loses_nothing():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=240)
    assert done.stderr == ""
    *heard, got = done.stdout.split()
    assert heard == ["recv", "accept", "send", "flush", "close"]
    assert int(got) in (1, 2)


FORKED = """
import os, sys, threading
import numpy as np
import pdkv

near, far = pdkv.Engine("near"), pdkv.Engine("far")
sender = near.connect(far.address, timeout_s=60).open_pipe(b"pipe")
receiver = far.accept_pipe(b"pipe", timeout_s=60)
array = np.ones(1 << 20, np.uint8)

def send():
    sender.send(b"x", "uint8", array.shape, (1,), 1, array.__array_interface__["data"][0], array)

send()
kept = receiver.recv(60)[3]
send()
blocked = threading.Thread(target=lambda: [receiver.recv(60) for _ in range(2)])
blocked.start()
child = os.fork()
if child == 0:
    refused = 0
    calls = (send, sender.flush, sender.close, lambda: receiver.recv(5), lambda: far.accept_pipe(b"x", timeout_s=60))
    for call in calls:
        try:
            call()
        except pdkv.UnsupportedError:
            refused += 1
    sender.abort()
    receiver.close()
    assert not sender.alive and not receiver.alive
    sender.stats, receiver.stats, sender.queued_bytes, sender.path
    del sender, receiver, kept
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
send()
blocked.join()
sender.close(60)
assert np.frombuffer(kept, np.uint8).all()
print("went on")
"""


def test_a_fork_neither_uses_nor_ends_its_parents_pipes():
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.stderr, done.stdout) == ("", "went on\n")


EXITS = {
    "everything is open": "",
    "an item is under way": "sender.flush",
    "a tensor is held": "kept = receiver.recv(60)",
    "the memory first": "del array",
    "pipes first": "del sender, receiver",
    "engines first": "del near, far",
    "a thread receives": "threading.Thread(target=lambda: [receiver.recv() for _ in range(9)], daemon=True).start()",
    "a thread sends": "threading.Thread(target=lambda: [send() for _ in range(999)], daemon=True).start()",
    "closed at exit": "import atexit; atexit.register(lambda: (receiver.close(), sender.abort(), near.close()))",
}


@pytest.mark.parametrize("order", EXITS)
def test_a_process_with_pipes_ends_with_code_0(order):
    setup = INTERRUPTED.split("calls =")[0].replace("limit_bytes=0", "limit_bytes=1 << 30")
    script = setup + "for _ in range(5): send()\n" + EXITS[order]
    command = [sys.executable, "-X", "faulthandler", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def test_tensors_that_are_held_cost_few_descriptors(ends):
    sender, receiver = ends
    array = np.arange(70_000, dtype=np.uint8)
    held = []
    before = descriptors()
    for number in range(300):
        array[:8] = number % 251
        send(sender, array)
        held.append(np.frombuffer(receiver.recv(60)[3], np.uint8))
    assert descriptors() - before < 60
    for number, got in enumerate(held):
        assert (got[:8] == number % 251).all()
        assert np.array_equal(got[8:], array[8:])


@pytest.mark.slow
def test_a_thousand_pipes_leave_nothing_behind(engine):
    array, others = np.ones(200_000, np.uint8), threads()
    with pdkv.Engine("far") as far:
        peer = engine.connect(far.address, timeout_s=60)

        def one(number):
            sender = peer.open_pipe(b"pipe")
            receiver = far.accept_pipe(b"pipe", timeout_s=60)
            send(sender, array)
            assert receiver.recv(60)[3].nbytes == array.nbytes
            if number % 4 == 0:
                sender.close(60)
            elif number % 4 == 1:
                receiver.close()
            elif number % 4 == 2:
                send(sender, array)
                sender.abort()

        for number in range(100):
            one(number)
        gc.collect()
        until(lambda: threads() < others + 40)
        before = (descriptors(), threads())
        for number in range(1000):
            one(number)
        gc.collect()
        until(lambda: descriptors() <= before[0] + 4 and threads() <= before[1] + 4, 60)
    # With the engine the last of the memory goes too.
    until(lambda: "pdkv-pool" not in Path("/proc/self/maps").read_text())


def test_descriptors_that_run_out_are_an_error_and_no_loss(ends):
    import resource

    sender, receiver = ends
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    array = np.ones(MIB, np.uint8)
    send(sender, array)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
    try:
        with pytest.raises(pdkv.CapacityError):
            receiver.recv(60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert receiver.recv(60)[3].nbytes == MIB


def test_closing_while_others_send_and_receive_ends_them_all(ends):
    sender, receiver = ends
    array = np.ones(300_000, np.uint8)
    outcomes = []

    def run(call):
        try:
            while True:
                call()
        except pdkv.PdkvError as error:
            outcomes.append(type(error))

    calls = [lambda: send(sender, array)] * 3 + [lambda: receiver.recv(60)] * 3
    workers = [threading.Thread(target=run, args=(call,)) for call in calls]
    for worker in workers:
        worker.start()
    time.sleep(0.2)
    receiver.close()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert outcomes == [pdkv.ClosedError] * 6
