"""`SimpleBuffer` over two pipes: vLLM's exchange word by word, and what is better than vLLM's."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pdkv
from lookup.fake_pipe import fake_pair
from pdkv.lookup_buffer import SimpleBuffer


def ints(*tokens):
    return np.array(tokens, np.int64)


@pytest.fixture
def pipes():
    """The signal and the data pipe, as (producer's end, consumer's end) of each."""
    made = fake_pair(), fake_pair()
    yield made
    for ends in made:
        ends[0].abort()


def buffers(pipes, **options):
    (signal, other_signal), (data, other_data) = pipes
    return SimpleBuffer(signal, data, 1e6, **options), SimpleBuffer(other_signal, other_data, 1e6)


def entry(*tokens):
    return ints(*tokens), np.ones(len(tokens), bool), np.full((2, 3), tokens[0], np.float32), np.zeros(2), np.ones(1)


def equal(found, given):
    return all(
        one is None if other is None else np.array_equal(one, other) for one, other in zip(found, given, strict=True)
    )


def test_what_is_inserted_is_selected(pipes):
    producer, consumer = buffers(pipes)
    producer.insert(*entry(1, 2, 3))
    producer.insert(*entry(4, 5))
    found = consumer.drop_select(ints(4, 5, 6), np.ones(3, bool))
    assert equal(found, entry(4, 5))
    assert found[1].dtype == bool
    assert equal(consumer.drop_select(None, None), entry(1, 2, 3))
    consumer.close()
    producer.close(timeout_s=60)


def test_the_exchange_is_vllms(pipes):
    (signal, other_signal), (data, other_data) = pipes
    producer = SimpleBuffer(signal, data, 1e6)
    producer.insert(ints(1, 2), np.array([True, False]), None, np.ones(3), None)
    other_signal.send_tensor(ints(0))
    other_data.send_tensor(ints(1, 9))
    other_data.send_tensor(np.array([1.0, 0.2], np.float32))
    tokens, roi, key, value, hidden = (other_data.recv_tensor() for _ in range(5))
    assert (tokens.tolist(), roi.tolist(), roi.dtype) == ([1, 2], [1.0, 0.0], np.float32)
    assert (key, hidden, value.tolist()) == (None, None, [1.0] * 3)
    other_signal.send_tensor(None)
    producer.close(timeout_s=60)
    assert producer._room.used == 0


def test_the_consumer_says_what_vllms_producer_expects(pipes):
    (signal, other_signal), (data, other_data) = pipes
    consumer = SimpleBuffer(other_signal, other_data, 1e6)
    for answer in entry(1, 2):
        data.send_tensor(answer)
    assert consumer.drop_select(ints(1, 2), None)[1].tolist() == [True, True]
    assert signal.recv_tensor().tolist() == [0]
    assert data.recv_tensor().tolist() == [1, 2]
    # Its producer ends when a mask is missing, so there always is one.
    assert data.recv_tensor().tolist() == [1.0, 1.0]
    consumer.close()
    assert signal.recv_tensor() is None


def test_a_miss_waits_for_its_insert(pipes):
    producer, consumer = buffers(pipes)
    producer.insert(*entry(1))
    found = []
    thread = threading.Thread(target=lambda: found.append(consumer.drop_select(ints(7), None)), daemon=True)
    thread.start()
    producer.insert(*entry(7, 8))
    thread.join(60)
    assert equal(found[0], entry(7, 8))
    consumer.close()
    producer.close(timeout_s=60)


def test_the_two_sides_do_not_swap(pipes):
    producer, _ = buffers(pipes)
    producer.insert(*entry(1))
    with pytest.raises(pdkv.UnsupportedError, match="other end"):
        producer.drop_select(None, None)


@pytest.mark.parametrize("clone", [True, False])
def test_the_inserted_tensors_are_copied_unless_told_otherwise(pipes, clone):
    producer, consumer = buffers(pipes, clone=clone)
    given = entry(1, 2)
    producer.insert(*given)
    given[2][:] = 77
    assert (consumer.drop_select(ints(1), None)[2][0, 0] == 77) == (not clone)
    consumer.close()
    producer.close(timeout_s=60)


def test_what_can_never_fit_is_refused(pipes):
    producer, _ = buffers(pipes)
    with pytest.raises(pdkv.CapacityError):
        producer.insert(ints(1), None, np.zeros(2_000_000), None, None)


def test_close_ends_a_request_that_nothing_will_match(pipes):
    producer, consumer = buffers(pipes)
    producer.insert(*entry(1))
    failed = []

    def ask():
        try:
            consumer.drop_select(ints(7), None)
        except pdkv.PdkvError as error:
            failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    producer.close(timeout_s=60)
    thread.join(60)
    assert isinstance(failed[0], pdkv.PeerError)


def test_an_exchange_that_is_interrupted_is_the_last_one(pipes):
    (signal, _), (data, other_data) = pipes
    _, consumer = buffers(pipes)
    received = []

    def interrupted():
        received.append(1)
        if len(received) == 2:
            raise MemoryError("no room for the second of five")
        return ints(1)

    other_data.recv_tensor = interrupted
    with pytest.raises(MemoryError):
        consumer.drop_select(ints(1), None)
    del other_data.recv_tensor
    # What is left of it would pass for the answer to another request.
    with pytest.raises(MemoryError):
        consumer.drop_select(ints(2), None)
    assert len(received) == 2
    assert signal.recv_tensor().tolist() == [0]
    assert data.recv_tensor().tolist() == [1]


@pytest.mark.parametrize("how", ["done", "gone"])
def test_a_consumer_that_has_left_ends_the_inserts_that_wait(pipes, how):
    (signal, other_signal), (data, _) = pipes
    producer = SimpleBuffer(signal, data, 250)
    producer.insert(ints(1), None, np.zeros(25), None, None)
    failed = []

    def insert():
        try:
            producer.insert(ints(2), None, np.zeros(25), None, None)
        except pdkv.PdkvError as error:
            failed.append(error)

    thread = threading.Thread(target=insert, daemon=True)
    thread.start()
    while not producer._room._queue:
        pass
    if how == "done":
        other_signal.send_tensor(None)
    else:
        other_signal.abort()
    thread.join(60)
    assert isinstance(failed[0], pdkv.ClosedError if how == "done" else pdkv.PeerLostError)
    with pytest.raises(type(failed[0])):
        producer.insert(ints(1), None, None, None, None)


def test_a_pipe_that_breaks_gives_the_entry_back_and_the_next_insert_says_why(pipes):
    producer, consumer = buffers(pipes)
    producer.insert(*entry(1))
    pipes[1][0].refuse = ValueError("a broken wire")
    consumer.signal_pipe.send_tensor(ints(0))
    consumer.data_pipe.send_tensor(None)
    consumer.data_pipe.send_tensor(None)
    producer._thread.join(60)
    assert len(producer._shelf) == 1
    with pytest.raises(ValueError, match="broken wire"):
        producer.insert(*entry(2))
