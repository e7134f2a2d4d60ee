"""A peer that is stopped and goes on: the link is lost, memory that it may still write is kept, a new link works."""

from __future__ import annotations

import time

import pdkv
from attacks.far import until
from patience import follows_the_machine

PATIENT = {"peer_timeout_s": 60.0}
LARGE = {"layers": 4, "blocks": 128, "block_bytes": 128 << 10}
BLOCKS = list(range(32))
SAME = [(block, block) for block in BLOCKS]


def impatient(patience_s):
    return {"heartbeat_s": 0.2, "peer_timeout_s": patience_s}


@follows_the_machine
def test_stopped_owner(start, transport, patience_s):
    consumer = start("consumer", transport, seed=1, **impatient(patience_s))
    producer = start("producer", transport, seed=2, **PATIENT)
    peer = consumer.do("connect", producer.address)
    _, reference = producer.do("export", BLOCKS, consumers=2, lease_s=600)
    producer.stop()
    number = consumer.do("pull", reference, BLOCKS, timeout_s=300.0)
    outcome = consumer.do("outcome", number)
    assert isinstance(outcome["error"], pdkv.PeerLostError)
    assert outcome["destination"] in ("untouched", "invalid")
    assert outcome["quiesced"]
    # A lane may tell of the silence before the link does.
    until(lambda: not consumer.do("alive", peer), "the loss of the peer")
    producer.go_on()
    until(lambda: producer.do("peer_names") == [], "the loss of the link at the other end")
    consumer.do("connect", producer.address)
    assert consumer.do("outcome", consumer.do("pull", reference, BLOCKS))["state"] == "done"
    assert consumer.do("wrong", 2, SAME) == []


@follows_the_machine
def test_stopped_initiator(start, transport, patience_s):
    consumer = start("consumer", transport, seed=1, **PATIENT)
    producer = start("producer", transport, seed=2, **impatient(patience_s))
    peer = consumer.do("connect", producer.address)
    _, reference = producer.do("export", BLOCKS, lease_s=600)
    consumer.stop()
    until(lambda: producer.do("peer_names") == [], "the loss of the stopped peer")
    assert producer.do("stats")["live_claims"] == 0
    consumer.go_on()
    until(lambda: not consumer.do("alive", peer), "the loss of the link at the other end")
    consumer.do("connect", producer.address)
    assert consumer.do("outcome", consumer.do("pull", reference, BLOCKS))["state"] == "done"
    assert consumer.do("wrong", 2, SAME) == []


def claimed_and_stopped(start, transport, patience_s):
    """An owner with an offer, and its writer, stopped with the claim in its hands."""
    owner = start("owner", transport, seed=1, **impatient(patience_s), **LARGE)
    writer = start("writer", transport, seed=2, **PATIENT, **LARGE)
    writer.do("connect", owner.address)
    for _ in range(50):
        offer, reference = owner.do("offer", list(range(128)), lease_s=600)
        writer.post("push", reference, list(range(128)), timeout_s=300.0)
        until(lambda pin=offer: owner.do("stats")["live_claims"] or owner.do("export_state", pin)[1], "the claim")
        writer.stop()
        time.sleep(0.3)  # what it sent before it stopped is heard meanwhile
        if owner.do("stats")["live_claims"]:
            return owner, writer, offer
        writer.go_on()  # it was done before it could be stopped
        writer.result()
    raise AssertionError("the writer can't be caught with a claim")


@follows_the_machine
def test_stopped_writer_keeps_its_offer_until_it_is_dead(start, transport, patience_s):
    owner, writer, offer = claimed_and_stopped(start, transport, patience_s)
    until(lambda: owner.do("peer_names") == [], "the loss of the writer")
    owner.do("release", offer)
    if transport in ("shm", "cma"):
        # It lives, so it may go on copying when it wakes: the blocks are not given away.
        assert owner.do("export_state", offer) == ("releasing", False)
        assert not owner.do("wait_quiesced", offer, 1.0)
    writer.kill()
    assert owner.do("wait_quiesced", offer)


@follows_the_machine
def test_an_engine_that_closes_says_whether_its_memory_may_be_reused(start, transport, patience_s):
    owner, writer, _ = claimed_and_stopped(start, transport, patience_s)
    until(lambda: owner.do("peer_names") == [], "the loss of the writer")
    quiet, logged = owner.do("shut_down")
    assert not quiet  # the writer lives
    assert [line for line in logged if "`owner` is closed, but" in line] == logged != []
    assert owner.do("shut_down") == (False, [])  # it knows no more than then
    writer.go_on()
    writer.do("outcome", writer.result())
    assert writer.do("shut_down") == (True, [])


@follows_the_machine
def test_stopped_writer_gives_its_offer_back_when_it_goes_on(start, transport, patience_s):
    owner, writer, offer = claimed_and_stopped(start, transport, patience_s)
    until(lambda: owner.do("peer_names") == [], "the loss of the writer")
    owner.do("release", offer)
    writer.go_on()
    number = writer.result()
    outcome = writer.do("outcome", number)
    assert outcome["state"] == "failed"
    assert outcome["destination"] in ("untouched", "invalid")
    assert outcome["quiesced"]
    writer.do("connect", owner.address)  # over the new link it says that it is out
    assert owner.do("wait_quiesced", offer)
    # From here on nobody writes there.
    owner.do("stamp", 5)
    assert owner.do("wrong", 5, SAME) == []
    _, reference = owner.do("offer", BLOCKS)
    assert writer.do("outcome", writer.do("push", reference, BLOCKS))["state"] == "done"
    assert owner.do("wrong", 2, SAME) == []


def test_stalled_consumer_does_not_delay_another(start, transport):
    producer = start("producer", transport, seed=1, **PATIENT, **LARGE)
    stalled = start("stalled", transport, seed=2, **PATIENT, **LARGE)
    other = start("other", transport, seed=3, **PATIENT, **LARGE)
    for consumer in (stalled, other):
        consumer.do("connect", producer.address)
    whole = list(range(128))
    references = [producer.do("export", whole, lease_s=600)[1] for _ in range(4)]
    started = stalled.do("start_all", "pull", [(reference, whole) for reference in references], timeout_s=300.0)
    stalled.stop()
    for _ in range(3):
        _, reference = producer.do("export", BLOCKS)
        assert other.do("outcome", other.do("pull", reference, BLOCKS))["state"] == "done"
        assert other.do("wrong", 1, SAME) == []
    assert stalled.stopped()
    stalled.go_on()
    for number in started:
        assert stalled.do("outcome", number)["state"] == "done"
    assert stalled.do("wrong", 1, [(block, block) for block in whole]) == []
