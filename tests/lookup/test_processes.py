"""Lookup buffers between real processes: what arrives, and what a dead, stopped or lying end costs the others."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

import pdkv
from lookup.far import PATIENCE_S, End, Far, until
from pdkv.lookup_buffer.words import Kind, Word, pack

ODD = b'g{"version": 1, "address": "\\ud800:1", "token": "0123456789abcdef"}'
DEEP = b"g" + b"[" * 60_000


@pytest.fixture
def start():
    started = []

    def start(name, address=None, **settings):
        started.append(Far(name, address, **settings))
        return started[-1]

    yield start
    for far in started:
        far.close()


@pytest.fixture
def producer():
    end = End("producer")
    yield end
    end.close()


def test_tensors_and_blocks_arrive(start, producer):
    consumer = start("consumer", producer.address())
    consumer.post("drop_select", 1, 2, 3)
    producer.insert(1, 2)
    producer.insert(9, values=4_000_000)  # 32 MB go straight from the array's memory
    assert consumer.answer() == ([1, 2], 1.0, 1.0)
    assert consumer.do("drop_select", 9) == ([9], 9.0, 9.0)
    producer.insert_blocks(range(40), [5, 1, 7], 3.5)
    assert consumer.do("drop_select_into", range(40), [10, 11, 12]) == (40, 3.5, 3.5, 0)
    assert producer.ticket(0) == "taken"
    until(lambda: producer.waiting() == (0, 0), "the end of all entries")


def test_many_consumers_get_each_entry_once(start, producer):
    consumers = [start(f"consumer-{number}", producer.address()) for number in range(3)]
    for turn in range(20):
        for consumer in consumers:
            consumer.post("drop_select")
        for number in range(len(consumers)):
            producer.insert(turn * 10 + number, values=20_000)
        found = [consumer.answer()[0][0] for consumer in consumers]
        assert sorted(found) == [turn * 10 + number for number in range(len(consumers))]
    names = producer.threads()
    assert names.count("pdkv-lookup-consumer") == len(consumers)


def test_a_consumer_killed_between_match_and_taken_loses_nothing(start, producer):
    consumer, heir = start("consumer", producer.address()), start("heir", producer.address())
    producer.insert(1, 2, values=100_000)
    producer.insert(3)
    consumer.do("select", 1)
    assert consumer.do("hit") == 1
    assert heir.do("peek", 1) is None
    heir.post("drop_select", 1)
    consumer.kill()
    assert heir.answer() == ([1, 2], 1.0, 1.0)
    assert heir.do("drop_select") == ([3], 3.0, 3.0)
    until(lambda: producer.waiting() == (0, 0), "the end of all entries")
    until(lambda: producer.sessions() == 1, "the end of the dead one's session")


def test_a_consumer_killed_while_blocks_are_out_loses_nothing(start, producer):
    consumer, heir = start("consumer", producer.address()), start("heir", producer.address())
    producer.insert_blocks(range(32), [5, 1], 2.5)
    consumer.do("select_blocks", 32)
    consumer.kill()
    assert heir.do("drop_select_into", range(32), [10, 11]) == (32, 2.5, 2.5, 0)
    assert producer.ticket(0) == "taken"


def test_a_dead_consumers_requests_are_forgotten(start, producer):
    consumer = start("consumer", producer.address())
    consumer.do("select", 5)
    consumer.do("peek", 5)
    consumer.kill()
    until(lambda: producer.sessions() == 0, "the end of the dead one's session")
    producer.insert(5)
    again = start("consumer", producer.address())
    assert again.do("drop_select", 5) == ([5], 5.0, 5.0)


def test_a_producer_that_hangs_costs_a_timeout_and_nothing_else(start):
    far = start("producer")
    near = End("consumer", far.do("address"))
    try:
        far.do("insert", 1)
        far.stop()
        with pytest.raises(pdkv.TransferTimeoutError):
            near.drop_select(1, timeout_s=0.3)
        far.signal(signal.SIGCONT)
        assert near.drop_select(1) == ([1], 1.0, 1.0)
        until(lambda: far.do("waiting") == (0, 0), "the end of the entry")
    finally:
        near.close()


def test_a_producer_that_dies_ends_the_waits(start):
    far = start("producer")
    near = End("consumer", far.do("address"))
    try:
        near.select(1)
        far.do("peek", 1)
        far.kill()
        with pytest.raises(pdkv.PeerLostError):
            near.hit()
        with pytest.raises(pdkv.PeerLostError):
            near.peek(1)
    finally:
        near.close()


def test_the_end_of_a_producers_buffer_ends_the_waits_with_its_word(start):
    far = start("producer")
    near = End("consumer", far.do("address"))
    try:
        near.select(1)
        near.peek(1)
        far.post("close")
        with pytest.raises(pdkv.ClosedError, match="other end"):
            near.hit()
        far.answer()
    finally:
        near.close()


@pytest.mark.parametrize(
    "message", [b"junk", b"\xff" * 200, pack(Word(Kind.TAKEN, 77))], ids=["short", "noise", "forged"]
)
def test_a_consumer_that_talks_nonsense_is_cut_off_alone(start, producer, message):
    bad, good = start("bad", producer.address()), start("good", producer.address())
    producer.insert(1)
    bad.do("select")
    bad.do("hit")
    bad.do("say", message)
    assert good.do("drop_select") == ([1], 1.0, 1.0)
    until(lambda: producer.sessions() == 1, "the end of the bad one's session")
    with pytest.raises(pdkv.PdkvError):
        bad.do("peek", 1)


@pytest.mark.parametrize("message", [b"junk", pack(Word(Kind.HIT, 99, 1))], ids=["junk", "forged"])
def test_a_producer_that_talks_nonsense_is_left(start, message):
    far = start("producer")
    near = End("consumer", far.do("address"))
    try:
        near.select(1)
        near.peek(1)
        far.do("say", message, [np.zeros(2)] * 5)
        with pytest.raises(pdkv.IntegrityError):
            near.hit()
        until(lambda: far.do("sessions") == 0, "the end of the session")
    finally:
        near.close()


def test_who_greets_with_another_ones_address_is_not_let_in(start, producer, caplog):
    stranger, other = start("stranger"), End("other")
    try:
        stranger.do("greet_as", producer.address(), other.address())
        until(lambda: "and not `stranger`" in caplog.text, "the refusal")
        for words in (b"", b"junk", b"g{}", b"g[]", b'g{"version": 1, "address": 7, "token": "x"}', ODD, DEEP):
            stranger.do("greet", producer.address(), words)
        until(lambda: caplog.text.count("no greeting") == 7, "the refusals")
        assert producer.sessions() == 0
        consumer = start("consumer", producer.address())
        producer.insert(1)
        assert consumer.do("drop_select") == ([1], 1.0, 1.0)
    finally:
        other.close()


def test_a_producer_without_a_buffer_is_a_typed_error(producer):
    with pdkv.Engine("consumer") as engine:
        peer = engine.connect(producer.address(), timeout_s=PATIENCE_S)
        with pytest.raises(pdkv.HandshakeError, match="`buffer/other`"):
            pdkv.LookupBuffer(engine, peer, name="other", timeout_s=0.5)
    with pdkv.Engine("deaf", listen=None) as engine:
        peer = engine.connect(producer.address(), timeout_s=PATIENCE_S)
        with pytest.raises(pdkv.ConfigError, match="listen"):
            pdkv.LookupBuffer(engine, peer)


@pytest.mark.slow
def test_consumers_killed_again_and_again_lose_at_most_what_they_had_in_hand(start, producer):
    """At most one entry for each dead consumer is gone with it, or is given out twice."""
    random = np.random.default_rng(7)
    entries, kills = 300, 12
    for number in range(entries):
        producer.insert(number, values=int(random.choice([4, 200_000])))
    found, consumers = [], [start(f"consumer-{number}", producer.address()) for number in range(3)]
    for number in range(kills):
        for consumer in consumers:
            for _ in range(int(random.integers(1, 6))):
                consumer.post("drop_select")
        time.sleep(float(random.random()) * 0.02)
        victim = consumers.pop(int(random.integers(len(consumers))))
        victim.kill()
        found += [answer[0][0] for answer in victim.answers()]
        for consumer in consumers:
            found += [answer[0][0] for answer in consumer.answers(all_of_them=True)]
        consumers.append(start(f"heir-{number}", producer.address()))
    until(lambda: producer.sessions() == len(consumers), "the end of the dead ones' sessions")
    left = producer.waiting()[0]
    found += [producer.drop_select()[0][0] for _ in range(left)]
    # A word of thanks that died with its process gives the entry to another one.
    twice, lost = len(found) - len(set(found)), entries - len(set(found))
    assert twice + lost <= kills, (twice, lost)
