"""Blocks of a paged cache as entries: pulled into other pages, given back when that fails, pinned until it is over."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import pytest

import pdkv
from lookup.fake_pipe import fake_pair
from pdkv.lookup_buffer import LookupBuffer
from pdkv.lookup_buffer.remote import Remote
from pdkv.lookup_buffer.server import Session
from pdkv.testing import connected_pair

SHAPE = (32, 2, 16, 8)  # blocks, heads, tokens, content


class World(NamedTuple):
    """A producer's buffer and a consumer's, each with a cache."""

    producer: LookupBuffer
    consumer: LookupBuffer
    source: pdkv.KvCache
    target: pdkv.KvCache
    written: np.ndarray
    read: np.ndarray
    pair: object


@pytest.fixture
def world():
    written = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    read = np.zeros(SHAPE, np.float32)
    with connected_pair() as pair:
        source = pair.producer.register_kv_cache({"a": written}, layout="BHNC", block_tokens=16)
        target = pair.consumer.register_kv_cache({"a": read}, layout="BHNC", block_tokens=16)
        producer, consumer = LookupBuffer(), LookupBuffer()
        ours, theirs = fake_pair()
        session = Session(producer._shelves, ours, "consumer", 60.0)
        thread = threading.Thread(target=session.run, daemon=True)
        thread.start()
        consumer._remote, consumer._peer = Remote(theirs, "producer"), pair.to_producer
        yield World(producer, consumer, source, target, written, read, pair)
        consumer.close()
        thread.join(60)
        producer.close()


def tokens(count, first=0):
    return np.arange(first, first + count, dtype=np.int64)


def test_blocks_are_pulled_into_other_pages(world):
    ticket = world.producer.insert_blocks(tokens(40), world.source, [3, 9, 5], hidden=np.ones(4))
    assert ticket.state == "waiting"
    assert world.consumer.peek(tokens(40), blocks=True) == 40
    assert world.consumer.peek(tokens(40)) is None
    found = world.consumer.drop_select_into(tokens(40), world.target, [20, 7, 8], timeout_s=60)
    assert (found.num_tokens, found.num_blocks) == (40, 3)
    assert (found.tokens.tolist(), found.hidden.tolist()) == (list(range(40)), [1.0] * 4)
    assert np.array_equal(world.read[[20, 7, 8]], world.written[[3, 9, 5]])
    assert found.transfer.stats.staged_bytes == 0
    assert ticket.wait(60) == "taken"
    assert world.producer.used_bytes == 0


def test_a_shorter_request_gets_the_blocks_of_its_tokens(world):
    world.producer.insert_blocks(tokens(48), world.source, np.array([1, 2, 3]))
    found = world.consumer.drop_select_into(tokens(20), world.target, np.array([11, 12, 13]), timeout_s=60)
    assert (found.num_tokens, found.num_blocks) == (20, 2)
    assert np.array_equal(world.read[[11, 12]], world.written[[1, 2]])
    assert not world.read[13].any()


def test_a_longer_request_gets_the_tokens_that_there_are(world):
    world.producer.insert_blocks(tokens(16), world.source, [1])
    found = world.consumer.drop_select_into(tokens(40), world.target, [11, 12, 13], timeout_s=60)
    assert (found.num_tokens, found.num_blocks) == (16, 1)


def test_any_blocks_may_be_asked_for(world):
    world.producer.insert_blocks(tokens(32), world.source, [1, 2])
    with pytest.raises(pdkv.LayoutError, match="take `2` blocks"):
        world.consumer.drop_select_into(None, world.target, [4], timeout_s=60)
    found = world.consumer.drop_select_into(None, world.target, [4, 5], timeout_s=60)
    assert found.num_blocks == 2


def test_a_pull_that_fails_gives_the_entry_back(world):
    ticket = world.producer.insert_blocks(tokens(32), world.source, [1, 2])
    with pytest.raises(pdkv.UnsupportedError):
        world.consumer.drop_select_into(tokens(32), world.target, [4, 5], timeout_s=60, require="ucx")
    with pytest.raises(pdkv.LayoutError):
        world.consumer.drop_select_into(tokens(32), world.target, [4, 99], timeout_s=60)
    assert ticket.state == "waiting"
    world.consumer.drop_select_into(tokens(32), world.target, [4, 5], timeout_s=60)
    assert ticket.wait(60) == "taken"


def test_what_is_no_entry_is_refused_before_anybody_is_asked(world):
    for blocks in ([1, 2], [1, 2, 99], [1.5, 2, 3]):
        with pytest.raises(pdkv.LayoutError):
            world.producer.insert_blocks(tokens(33), world.source, blocks)
    with pytest.raises(pdkv.LayoutError, match="no tokens"):
        world.producer.insert_blocks(tokens(0), world.source, [])
    with pytest.raises(pdkv.LayoutError, match="take `3` blocks"):
        world.consumer.drop_select_into(tokens(40), world.target, [1, 2], timeout_s=60)
    with pytest.raises(pdkv.UnsupportedError, match="consumer"):
        world.consumer.insert_blocks(tokens(16), world.target, [1])
    with pytest.raises(pdkv.UnsupportedError, match="engine of its own"):
        world.producer.drop_select_into(tokens(16), world.source, [1])
    assert len(world.producer) == 0


def test_tickets_tell_when_blocks_may_be_used_again(world):
    dropped = world.producer.insert_blocks(tokens(16), world.source, [1])
    closed = world.producer.insert_blocks(tokens(16), world.source, [2])
    with pytest.raises(pdkv.TransferTimeoutError, match="still in the buffer"):
        dropped.wait(0.01)
    dropped.drop()
    assert dropped.wait(0) == "dropped"
    dropped.drop()
    world.producer.close()
    assert closed.wait(0) == "dropped"


def test_a_ticket_dropped_under_way_waits_for_the_consumer(world):
    ticket = world.producer.insert_blocks(tokens(16), world.source, [1])
    selection = world.consumer._select(tokens(16), None, blocks=True).start()
    hit = selection.hit(60)
    ticket.drop()
    with pytest.raises(pdkv.TransferTimeoutError, match="being read"):
        ticket.wait(0.01)
    selection.cancel()
    assert ticket.wait(60) == "dropped"
    # The reference that was out is worth nothing any more.
    with pytest.raises(pdkv.StaleReferenceError):
        world.target.pull(hit.reference, into=[1], peer=world.pair.to_producer).wait(60)


def test_a_producer_that_lies_about_its_tokens_is_not_believed(world):
    entry = world.producer.insert_blocks(tokens(16), world.source, [1])._entry
    entry.tensors[0] = tokens(16, first=5)
    with pytest.raises(pdkv.IntegrityError):
        world.consumer.drop_select_into(tokens(16), world.target, [1], timeout_s=60)
    assert not world.read.any()


def test_whoever_gave_up_can_no_longer_read_what_another_one_took(world):
    ticket = world.producer.insert_blocks(tokens(16), world.source, [1])
    entry = ticket._entry
    first = entry.lend(60.0)  # what a consumer was sent that cancelled and has not read it yet
    assert world.consumer.drop_select_into(tokens(16), world.target, [4], timeout_s=60).num_blocks == 1
    assert ticket.wait(60) == "taken"
    with pytest.raises(pdkv.StaleReferenceError):
        world.target.pull(first.reference, into=[5], peer=world.pair.to_producer).wait(60)
    with pytest.raises(pdkv.ClosedError):
        entry.lend(60.0)
