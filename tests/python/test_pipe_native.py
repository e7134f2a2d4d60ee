"""The native pipe under `pdkv.pipe`: items, tensors of every shape and size over every transport, every kind of end."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

import numpy as np
import pytest

import pdkv

TRANSPORTS = ["inproc", "shm", "cma", "tcp"]
MIB = 1 << 20


def send(pipe, array, tag=b"", **kwargs):
    strides = [step // array.itemsize for step in array.strides]
    address = array.__array_interface__["data"][0]
    pipe.send(tag, array.dtype.name, array.shape, strides, array.itemsize, address, array, **kwargs)


def receive(pipe, timeout_s=60):
    tag, dtype, shape, buffer = pipe.recv(timeout_s)
    if dtype is None:
        assert (shape, buffer) == ((), None)
        return tag, None
    array = np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)
    return tag, array.reshape(shape)


def pattern(nbytes, seed=1):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class Ends:
    """Two engines, a pipe from one to the other."""

    def __init__(self, limit_bytes=1_000_000_000, **settings):
        self.near, self.far = (pdkv.Engine(name, **settings) for name in ("near", "far"))
        self.peer = self.near.connect(self.far.address, timeout_s=60)
        self.sender = self.peer.open_pipe(b"test", limit_bytes=limit_bytes)
        self.receiver = self.far.accept_pipe(b"test", timeout_s=60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.near.close()
        self.far.close()


@pytest.fixture
def ends():
    with Ends() as ends:
        yield ends


@pytest.fixture(params=TRANSPORTS)
def ends_over(request):
    with Ends(transports=[request.param]) as ends:
        yield request.param, ends


def test_items_come_in_order_as_they_were(ends):
    arrays = [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.array(3.5, dtype=np.float32),
        np.empty((0, 4), dtype=np.float16),
        np.zeros(0, dtype=bool),
        pattern(64 * 1024),
        np.arange(24, dtype=np.complex128).reshape(2, 3, 4).T,
        np.arange(10, dtype=np.int16)[::-3],
        np.broadcast_to(np.arange(5, dtype=np.uint8), (3, 5)),
    ]
    for number, array in enumerate(arrays):
        send(ends.sender, array, tag=b"%d" % number)
        ends.sender.send(b"none", None, (), (), 1, 0, None)
    for number, array in enumerate(arrays):
        tag, got = receive(ends.receiver)
        assert tag == b"%d" % number
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(got, array)
        assert got.flags.writeable or not got.size
        assert receive(ends.receiver) == (b"none", None)
    assert ends.receiver.stats["items"] == ends.sender.stats["items"] == 2 * len(arrays)
    assert (ends.receiver.peer, ends.receiver.incarnation) == ("near", ends.near.incarnation)
    assert ends.sender.alive
    assert ends.receiver.alive


def test_a_small_tensor_may_change_once_it_was_sent(ends):
    array = np.ones(1000, np.uint8)
    send(ends.sender, array)
    array[:] = 7
    assert (receive(ends.receiver)[1] == 1).all()


def test_large_items_go_straight_into_memory_over(ends_over):
    transport, ends = ends_over
    arrays = [pattern(size, size) for size in (64 * 1024 + 1, 3 * MIB + 5, 40 * MIB, 300_000)]
    for array in arrays:
        send(ends.sender, array)
        send(ends.sender, array[:17])
    for array in arrays:
        np.testing.assert_array_equal(receive(ends.receiver)[1], array)
        np.testing.assert_array_equal(receive(ends.receiver)[1], array[:17])
    ends.sender.flush(60)
    total = sum(array.nbytes for array in arrays)
    assert ends.sender.path == transport
    assert ends.sender.stats["direct_bytes"] == ends.receiver.stats["direct_bytes"] == total
    assert (ends.sender.stats["staged_bytes"], ends.sender.queued_bytes) == (0, 0)


def test_strided_tensors_are_gathered_by_their_strides_over(ends_over):
    _, ends = ends_over
    base = pattern(24 * MIB).view(np.uint16)
    long_runs = base.reshape(6, 512, 4096)[:, ::2, 100:3100]
    short_runs = base.reshape(3072, 4096)[::3, 1::2]
    turned = base.reshape(4096, 3072).T
    backwards = base.reshape(3072, 4096)[::-1]
    for array in (long_runs, short_runs, turned, backwards):
        send(ends.sender, array)
        got = receive(ends.receiver)[1]
        assert np.array_equal(got, array)
    ends.sender.flush(60)
    assert ends.sender.stats["staged_bytes"] == short_runs.nbytes + turned.nbytes
    assert ends.sender.stats["direct_bytes"] == long_runs.nbytes + backwards.nbytes


def test_a_tensor_is_kept_until_it_is_placed_and_no_longer(ends):
    class Keeper:
        pass

    keeper = Keeper()
    gone = weakref.ref(keeper)
    array = pattern(MIB)
    ends.sender.send(b"", "uint8", (MIB,), (1,), 1, array.__array_interface__["data"][0], keeper)
    del keeper
    time.sleep(0.05)
    assert gone() is not None
    receive(ends.receiver)
    ends.sender.flush(60)
    until(lambda: ends.sender.queued_bytes == 0 and gone() is None)


def until(holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def test_memory_of_an_item_is_used_again_once_it_is_let_go(ends):
    addresses = set()
    for _ in range(6):
        send(ends.sender, pattern(2 * MIB))
        buffer = ends.receiver.recv(60)[3]
        addresses.add(buffer.address)
        del buffer
    assert len(addresses) == 1
    send(ends.sender, pattern(2 * MIB, 1))
    send(ends.sender, pattern(2 * MIB, 2))
    one, two = (receive(ends.receiver)[1] for _ in range(2))
    assert np.array_equal(one, pattern(2 * MIB, 1))
    assert np.array_equal(two, pattern(2 * MIB, 2))
    ends.receiver.close()
    ends.near.close()
    ends.far.close()
    assert np.array_equal(one, pattern(2 * MIB, 1)), "what was received outlives the pipe"


def test_sending_waits_while_more_than_the_limit_is_queued():
    with Ends(limit_bytes=3 * MIB) as ends:
        array = pattern(2 * MIB)
        send(ends.sender, array)
        send(ends.sender, array)
        assert ends.sender.queued_bytes == 4 * MIB
        with pytest.raises(pdkv.TransferTimeoutError):
            send(ends.sender, array, timeout_s=0.05)
        assert ends.sender.queued_bytes == 4 * MIB
        waiter = threading.Thread(target=send, args=(ends.sender, array))
        waiter.start()
        receive(ends.receiver)
        waiter.join(60)
        assert not waiter.is_alive()
        # Larger than the limit: alone.
        for _ in range(2):
            receive(ends.receiver)
        until(lambda: ends.sender.queued_bytes == 0)
        send(ends.sender, pattern(9 * MIB))
        assert receive(ends.receiver)[1].nbytes == 9 * MIB


def test_a_timeout_loses_nothing(ends):
    for timeout in (0, 0.02):
        with pytest.raises(pdkv.TransferTimeoutError):
            ends.receiver.recv(timeout)
    big = pattern(200 * MIB)
    late = 0
    while not late:  # it may all be there before this thread looks
        send(ends.sender, big)
        send(ends.sender, big[:5], tag=b"after")
        while True:
            try:
                _, got = receive(ends.receiver, 0)
                break
            except pdkv.TransferTimeoutError:
                late += 1
        assert np.array_equal(got, big)
        assert receive(ends.receiver)[0] == b"after"
    ends.sender.close(60)


def test_a_closed_pipe_says_who_closed_it(ends):
    send(ends.sender, pattern(10), tag=b"last")
    closer = threading.Thread(target=ends.sender.close)
    closer.start()
    assert receive(ends.receiver)[0] == b"last"
    closer.join(60)
    for _ in range(2):
        with pytest.raises(pdkv.ClosedError) as caught:
            ends.receiver.recv(60)
        assert caught.value.context["closed_by"] == "peer"
    assert not ends.receiver.alive
    with pytest.raises(pdkv.ClosedError) as caught:
        send(ends.sender, pattern(10))
    assert caught.value.context["closed_by"] == "here"
    ends.sender.close()


def test_a_receiver_that_closes_is_an_error_of_the_sender(ends):
    blocked = []

    def receive_for_ever():
        with pytest.raises(pdkv.ClosedError) as caught:
            ends.receiver.recv()
        blocked.append(caught.value.context["closed_by"])

    waiter = threading.Thread(target=receive_for_ever)
    waiter.start()
    time.sleep(0.05)
    ends.receiver.close()
    ends.receiver.close()
    waiter.join(60)
    assert blocked == ["here"]

    def fails():
        try:
            send(ends.sender, pattern(10))
        except pdkv.ClosedError as error:
            return error.context["closed_by"] == "peer"
        return False

    until(fails)
    assert not ends.sender.alive
    ends.sender.close(60)


def test_an_aborted_pipe_ends_both(ends):
    send(ends.sender, pattern(10))
    send(ends.sender, pattern(MIB))
    receive(ends.receiver)
    ends.sender.abort()
    with pytest.raises(pdkv.TransferCancelledError, match="gave up"):
        ends.receiver.recv(60)
    with pytest.raises(pdkv.TransferCancelledError):
        ends.sender.flush(60)
    assert ends.sender.queued_bytes == 0


def test_pipes_are_told_apart_by_name_and_by_life(ends):
    second = ends.peer.open_pipe(b"second")
    third = ends.peer.open_pipe(b"third")
    third.send(b"3", None, (), (), 1, 0, None)
    second.send(b"2", None, (), (), 1, 0, None)
    with pytest.raises(pdkv.TransferTimeoutError, match="nobody has opened the pipe `third`"):
        ends.far.accept_pipe(b"third", incarnation="00" * 16, timeout_s=0.05)
    with pytest.raises(pdkv.ConfigError):
        ends.far.accept_pipe(b"third", incarnation="x")
    assert ends.far.accept_pipe(b"third", incarnation=ends.near.incarnation, timeout_s=60).recv(60)[0] == b"3"
    assert ends.far.accept_pipe(b"second", timeout_s=60).recv(60)[0] == b"2"
    bounded = ends.peer.open_pipe(b"bounded")
    send(bounded, pattern(100_000))
    with pytest.raises(pdkv.CapacityError, match="at most `99999` are taken"):
        ends.far.accept_pipe(b"bounded", max_item_bytes=99_999, timeout_s=60).recv(60)
    with pytest.raises(pdkv.CapacityError):
        bounded.flush(60)


def test_what_can_never_be_sent_is_refused_and_the_pipe_lives(ends):
    for tag, dtype, shape, strides, itemsize, error in [
        (b"x" * 65537, None, (), (), 1, pdkv.CapacityError),
        (b"", "Float32", (1,), (1,), 4, pdkv.LayoutError),
        (b"", "float32", (1,) * 33, (1,) * 33, 4, pdkv.LayoutError),
        (b"", "float32", (-1,), (1,), 4, pdkv.LayoutError),
        (b"", "float32", (2,), (), 4, pdkv.LayoutError),
        (b"", "float32", (2,), (1,), 0, pdkv.LayoutError),
        (b"", "float32", (1 << 62, 2), (1, 1), 4, pdkv.LayoutError),
        (b"", "float32", (1,), (1,), 4, pdkv.RegionError),
        (b"", "float32", (1 << 70,), (1,), 4, pdkv.LayoutError),
        (b"", "float32", (1,), (1 << 70,), 4, pdkv.LayoutError),
        (b"", "float32", (1,), (1,), -4, pdkv.LayoutError),
    ]:
        with pytest.raises(error):
            ends.sender.send(tag, dtype, shape, strides, itemsize, 0, None)
    with pytest.raises(pdkv.CapacityError):
        ends.peer.open_pipe(b"x" * 129)
    with pytest.raises(pdkv.ConfigError):
        ends.peer.open_pipe(b"x", limit_bytes=-1)
    send(ends.sender, pattern(10), tag=b"fine")
    assert receive(ends.receiver)[0] == b"fine"


@pytest.mark.parametrize("side", ["near", "far"])
def test_an_engine_that_closes_ends_everyone_who_waits(ends, side):
    outcomes = {}

    def catch(name, call, *args):
        try:
            call(*args)
        except pdkv.PdkvError as error:
            outcomes[name] = type(error)

    waiters = [
        threading.Thread(target=catch, args=("recv", ends.receiver.recv)),
        threading.Thread(target=catch, args=("accept", ends.far.accept_pipe, b"never")),
    ]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.05)
    getattr(ends, side).close()
    if side == "near":
        waiters[0].join(60)
        assert outcomes == {"recv": pdkv.PeerLostError}
        ends.far.close()
    for waiter in waiters:
        waiter.join(60)
        assert not waiter.is_alive()
    assert outcomes["accept"] is pdkv.ClosedError
    assert outcomes["recv"] in (pdkv.PeerLostError, pdkv.ClosedError)

    def fails():
        try:
            send(ends.sender, pattern(10))
        except (pdkv.PeerLostError, pdkv.ClosedError):
            return True
        return False

    until(fails)


def test_both_directions_from_many_threads(ends):
    back = ends.far.connect(ends.near.address, timeout_s=60).open_pipe(b"back")
    other = ends.near.accept_pipe(b"back", timeout_s=60)
    each, threads = 300, 4

    def produce(pipe, number):
        for index in range(each):
            send(pipe, np.array([number, index]), tag=b"t")

    got = {"there": [], "back": []}

    def consume(pipe, into):
        while len(into) < each * threads:
            with contextlib.suppress(pdkv.TransferTimeoutError):
                into.append(tuple(receive(pipe, 0.5)[1]))

    workers = [threading.Thread(target=produce, args=(pipe, n)) for pipe in (ends.sender, back) for n in range(threads)]
    workers += [threading.Thread(target=consume, args=(ends.receiver, got["there"])) for _ in range(2)]
    workers += [threading.Thread(target=consume, args=(other, got["back"]))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    for items in got.values():
        assert sorted(items) == [(n, index) for n in range(threads) for index in range(each)]
    assert got["back"] == sorted(got["back"], key=lambda item: got["back"].index(item))
    for number in range(threads):
        mine = [index for n, index in got["back"] if n == number]
        assert mine == sorted(mine)
