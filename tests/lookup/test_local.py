"""`LookupBuffer` without a network: order, waiting, room, masks, cancelling, and what is refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pdkv
from pdkv.lookup_buffer import LookupBuffer


def ints(*tokens):
    return np.array(tokens, np.int64)


def insert(buffer, *tokens, nbytes=8, **options):
    buffer.insert(ints(*tokens), None, np.full(nbytes, tokens[0], np.uint8), None, None, **options)


def first_token(found):
    return int(found[0][0])


@pytest.fixture
def buffer():
    with LookupBuffer() as buffer:
        yield buffer


def in_thread(call, *arguments, **options):
    """Starts a call; returns its thread and where its result will be."""
    result = []

    def run():
        try:
            result.append(call(*arguments, **options))
        except pdkv.PdkvError as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def test_what_is_inserted_is_selected_as_the_same_objects(buffer):
    given = [ints(1, 2, 3), np.array([True, True, False]), np.ones((2, 3)), None, np.zeros(2)]
    buffer.insert(*given)
    found = buffer.drop_select(ints(1, 2), None, timeout_s=60)
    assert all(one is other for one, other in zip(found, given, strict=True))
    assert (len(buffer), buffer.used_bytes) == (0, 0)


def test_nothing_at_all_takes_the_first_and_none_is_a_value(buffer):
    buffer.insert(None, None, None, None, None)
    insert(buffer, 7)
    assert buffer.drop_select(None, None, timeout_s=60) == [None] * 5
    assert first_token(buffer.drop_select(None, None, timeout_s=60)) == 7


def test_a_hit_leaves_those_passed_over_behind_the_newest(buffer):
    for token in (1, 2, 3, 4):
        insert(buffer, token)
    assert first_token(buffer.drop_select(ints(3), timeout_s=60)) == 3
    insert(buffer, 5)
    order = [first_token(buffer.drop_select(None, timeout_s=60)) for _ in range(4)]
    assert order == [4, 1, 2, 5]


def test_masks_of_both_sides_count(buffer):
    buffer.insert(ints(9, 1, 2), np.array([0.0, 1.0, 0.9]), None, None, None)
    with pytest.raises(pdkv.TransferTimeoutError):
        buffer.drop_select(ints(9, 1, 2), None, timeout_s=0)
    assert buffer.peek(ints(1, 2, 3), np.array([True, True, False])) == 2
    found = buffer.drop_select(ints(8, 1, 2), np.array([False, True, True]), timeout_s=60)
    assert found[0].tolist() == [9, 1, 2]


def test_no_tokens_match_nothing(buffer):
    buffer.insert(ints(), None, None, None, None)
    insert(buffer, 1)
    assert buffer.peek(ints()) is None
    assert buffer.peek(ints(1, 2), np.array([False, False])) is None
    assert buffer.peek(None) == 0


def test_the_longest_prefix_may_be_asked_for():
    with LookupBuffer(match="longest_prefix") as buffer:
        insert(buffer, 1)
        insert(buffer, 1, 2, 3)
        assert buffer.peek(ints(1, 2, 3, 4)) == 3
        assert buffer.peek(ints(1, 2, 3, 4), match="either_prefix") == 1
        assert len(buffer.drop_select(ints(1, 2), timeout_s=60)[0]) == 3


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64])
def test_tokens_of_any_integer_type_match(buffer, dtype):
    buffer.insert(np.array([1, 2], dtype), None, None, None, None)
    assert buffer.peek(ints(1, 2)) == 2


def test_a_miss_waits_for_the_insert_that_ends_it(buffer):
    thread, result = in_thread(buffer.drop_select, ints(4, 5))
    waiting, other = in_thread(buffer.drop_select, ints(6))
    insert(buffer, 4)
    thread.join(60)
    assert first_token(result[0]) == 4
    insert(buffer, 6)
    waiting.join(60)
    assert first_token(other[0]) == 6


def test_requests_are_served_in_the_order_in_which_they_came(buffer):
    selections = [buffer.select(None), buffer.select(ints(1)), buffer.select(None), buffer.select(ints(1, 2))]
    for _ in range(3):
        insert(buffer, 1)
    assert [selection.done for selection in selections] == [True, True, True, False]
    insert(buffer, 1)
    assert all(first_token(selection.wait(60)) == 1 for selection in selections)


def test_a_cancelled_request_loses_nothing(buffer):
    for token in (1, 2, 3):
        insert(buffer, token)
    found = buffer.select(None)
    assert found.done
    assert len(buffer) == 2
    found.cancel()
    waiting = buffer.select(ints(9))
    thread, result = in_thread(waiting.wait)
    waiting.cancel()
    thread.join(60)
    assert isinstance(result[0], pdkv.TransferCancelledError)
    with pytest.raises(pdkv.TransferCancelledError):
        found.wait(0)
    insert(buffer, 9)
    assert [first_token(buffer.drop_select(None, timeout_s=60)) for _ in range(4)] == [1, 2, 3, 9]


def test_an_interrupted_wait_gives_the_entry_back(buffer):
    insert(buffer, 1)
    selection = buffer.select(None)
    assert selection.hit(60).matched == 1
    with pytest.raises(KeyboardInterrupt), selection:
        raise KeyboardInterrupt
    assert buffer.peek(ints(1)) == 1


def test_an_entry_that_comes_back_goes_to_whoever_waits(buffer):
    insert(buffer, 1)
    first, second = buffer.select(ints(1)), buffer.select(ints(1))
    assert (first.done, second.done) == (True, False)
    first.cancel()
    assert first_token(second.wait(60)) == 1
    with pytest.raises(pdkv.ClosedError, match="before"):
        second.wait(60)


def test_insert_waits_for_room_in_the_order_of_asking():
    with LookupBuffer(max_bytes=100) as buffer:
        insert(buffer, 1, nbytes=40)
        with pytest.raises(pdkv.TransferTimeoutError, match="56"):
            insert(buffer, 2, nbytes=48, timeout_s=0.01)
        large, _ = in_thread(insert, buffer, 3, nbytes=90)
        while not buffer._room._queue:
            pass
        small, _ = in_thread(insert, buffer, 4, nbytes=1)
        buffer.drop_select(ints(1), timeout_s=60)
        large.join(60)
        assert small.is_alive(), "a small entry overtook the large one"
        buffer.drop_select(ints(3), timeout_s=60)
        small.join(60)
        assert buffer.used_bytes == 9


def test_what_can_never_fit_is_refused_at_once():
    with LookupBuffer(max_bytes=100) as buffer, pytest.raises(pdkv.CapacityError, match="never fit") as caught:
        insert(buffer, 1, nbytes=93)
    assert not caught.value.retryable


def test_close_ends_every_wait():
    buffer = LookupBuffer(max_bytes=100)
    insert(buffer, 1, nbytes=90)
    calls = [in_thread(insert, buffer, 2, nbytes=90), in_thread(buffer.drop_select, ints(5)), in_thread(buffer.drain)]
    while not buffer._room._queue:
        pass
    buffer.close()
    for thread, _ in calls:
        thread.join(60)
    assert [type(result[0]) for _, result in calls] == [pdkv.ClosedError, pdkv.ClosedError, type(None)]
    buffer.close()
    for call in (lambda: insert(buffer, 1), lambda: buffer.drop_select(None)):
        with pytest.raises(pdkv.ClosedError):
            call()
    assert buffer.used_bytes == 0


def test_drain_waits_until_all_is_taken(buffer):
    insert(buffer, 1)
    with pytest.raises(pdkv.TransferTimeoutError, match="1"):
        buffer.drain(0.01)
    thread, _ = in_thread(buffer.drain)
    buffer.drop_select(None, timeout_s=60)
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("tokens", "roi", "key"),
    [
        (np.zeros(3), None, None),
        (np.zeros((2, 2), np.int64), None, None),
        (ints(1, 2), np.array([True]), None),
        (ints(1, 2), [1, 0], None),
        ("text", None, None),
        (ints(1), None, "text"),
    ],
)
def test_what_is_no_entry_is_refused_and_takes_no_room(buffer, tokens, roi, key):
    with pytest.raises(pdkv.LayoutError) as caught:
        buffer.insert(tokens, roi, key, None, None)
    assert caught.value.operation == "insert"
    assert (len(buffer), buffer.used_bytes) == (0, 0)


@pytest.mark.parametrize("dtype", ["O", "M8[D]", [("a", "i4")], ">i4"], ids=str)
def test_what_could_never_be_sent_is_refused_at_once(buffer, dtype):
    with pytest.raises(pdkv.UnsupportedError):
        buffer.insert(ints(1), None, np.zeros(2, dtype), None, None)
    assert (len(buffer), buffer.used_bytes) == (0, 0)


def test_bad_settings_are_refused():
    for settings in ({"match": "regex"}, {"max_bytes": 0}, {"hold_s": -1}, {"name": "x" * 65}, {"peer": object()}):
        with pytest.raises(pdkv.ConfigError):
            LookupBuffer(**settings)


def test_many_threads_insert_and_select(buffer):
    count, threads = 200, 4
    found = []

    def produce(number):
        for step in range(count):
            insert(buffer, number, step)

    def consume(number):
        for step in range(count):
            found.append(
                tuple(buffer.drop_select(ints(number, step) if step % 2 else ints(number, step, 5))[0].tolist())
            )

    workers = [in_thread(work, number)[0] for number in range(threads) for work in (produce, consume)]
    for worker in workers:
        worker.join(60)
    assert sorted(found) == [(number, step) for number in range(threads) for step in range(count)]
    assert (len(buffer), buffer.used_bytes) == (0, 0)
