"""kill -9 of either side while bytes move, in both directions, over every transport."""

from __future__ import annotations

import pytest

import pdkv
from attacks.far import until

LARGE = {"layers": 4, "blocks": 128, "block_bytes": 128 << 10}  # 64 MiB: long enough to be met on its way
PARTS = [list(range(first, first + 16)) for first in range(0, 128, 16)]
PIN = {"pull": "export", "push": "offer"}


def engines(start, transport, *names):
    return [start(name, transport, seed=seed, **LARGE) for seed, name in enumerate(names, 1)]


def pinned(owner, verb):
    """Every part of the owner's cache, exported or offered."""
    return [owner.do(PIN[verb], part, lease_s=600) for part in PARTS]


def check(initiator, owner_seed, verb, part, outcome):
    """A transfer that was cut off never says that its bytes are good; one that is done is right to the last word."""
    pairs = [(block, block) for block in part]
    assert outcome["quiesced"]
    assert outcome["staged_bytes"] == 0
    if outcome["state"] == "done":
        assert outcome["destination"] == "valid"
        if verb == "pull":
            assert initiator.do("wrong", owner_seed, pairs) == []
        return
    assert outcome["state"] == "failed"
    assert isinstance(outcome["error"], pdkv.PeerError), outcome
    assert outcome["destination"] in ("untouched", "invalid")
    if verb == "pull" and outcome["destination"] == "untouched":
        assert initiator.do("wrong", 1, pairs) == []


@pytest.mark.parametrize("verb", ["pull", "push"])
def test_killed_owner(start, transport, verb):
    initiator, other = engines(start, transport, "initiator", "other")
    met = False
    for attempt in range(20):
        owner = start("victim", transport, seed=3, **LARGE)
        initiator.do("stamp", 1)
        initiator.do("connect", owner.address)
        jobs = [(reference, part) for (_, reference), part in zip(pinned(owner, verb), PARTS, strict=True)]
        owner.do("die_when", "claimed")
        started = initiator.do("start_all", verb, jobs, timeout_s=300.0)
        owner.wait_gone()
        for number, part in zip(started, PARTS, strict=True):
            if isinstance(number, Exception):
                assert isinstance(number, pdkv.PeerError)
                continue
            outcome = initiator.do("outcome", number)
            check(initiator, 3, verb, part, outcome)
            met |= outcome["destination"] == "invalid"
        assert initiator.do("stats")["live_transfers"] == 0
        until(lambda: "victim" not in initiator.do("peer_names"), "the loss of the victim")
        if met and attempt > 0:
            break
    assert met, "no transfer was met on its way"
    initiator.do("connect", other.address)
    _, reference = other.do(PIN[verb], PARTS[0])
    number = initiator.do(verb, reference, PARTS[1])
    assert initiator.do("outcome", number)["state"] == "done"


@pytest.mark.parametrize("verb", ["pull", "push"])
def test_killed_initiator(start, transport, verb):
    owner, heir = engines(start, transport, "owner", "heir")
    heir.do("connect", owner.address)
    pins = pinned(owner, verb)
    victim = start("victim", transport, seed=3, **LARGE)
    victim.do("connect", owner.address)
    victim.do("die_when", "moving")
    victim.post("start_all", verb, [(reference, part) for (_, reference), part in zip(pins, PARTS, strict=True)])
    victim.wait_gone()
    until(lambda: owner.do("stats")["live_claims"] == 0, "the end of the victim's claims")
    until(lambda: owner.do("peer_names") == ["heir"], "the loss of the victim")
    for (number, reference), part in zip(pins, PARTS, strict=True):
        state, quiesced = owner.do("export_state", number)
        if verb == "push":
            # What the dead one wrote into is given up, what it did not claim still waits for a writer.
            owner.do("release", number)
            assert owner.do("wait_quiesced", number), state
            number, reference = owner.do("offer", part)
        elif quiesced:
            assert state == "done"
            continue
        else:
            assert state == "active"
        outcome = heir.do("outcome", heir.do(verb, reference, part))
        assert outcome["state"] == "done", outcome
        reader, seed = (heir, 1) if verb == "pull" else (owner, 2)
        assert reader.do("wrong", seed, [(block, block) for block in part]) == []
        assert owner.do("wait_quiesced", number)
    assert owner.do("stats")["live_exports"] == 0


def test_one_dead_producer_of_two(start, transport):
    consumer, good = engines(start, transport, "consumer", "good")
    bad = start("bad", transport, seed=3, **LARGE)
    for producer in (good, bad):
        consumer.do("connect", producer.address)
    halves = PARTS[:4], PARTS[4:]
    jobs = [
        [(producer.do("export", part)[1], part) for part in half]
        for producer, half in zip((good, bad), halves, strict=True)
    ]
    bad.stop()
    started = [consumer.do("start_all", "pull", jobs[index], timeout_s=300.0) for index in (1, 0)]
    bad.kill()
    for number in started[0]:
        outcome = consumer.do("outcome", number)
        assert isinstance(outcome["error"], pdkv.PeerLostError)
        assert outcome["destination"] in ("untouched", "invalid")
    for number, part in zip(started[1], halves[0], strict=True):
        assert consumer.do("outcome", number)["state"] == "done"
        assert consumer.do("wrong", 2, [(block, block) for block in part]) == []


def test_mappings_of_a_dead_peer_go(start):
    consumer, keeper = engines(start, "shm", "consumer", "keeper")
    before = consumer.do("resources")["mappings"]
    consumer.do("connect", keeper.address)
    kept = consumer.do("resources")["mappings"]
    assert kept > before
    victim = start("victim", "shm", **LARGE)
    consumer.do("connect", victim.address)
    _, reference = victim.do("export", PARTS[0])
    assert consumer.do("outcome", consumer.do("pull", reference, PARTS[0]))["state"] == "done"
    assert consumer.do("resources")["mappings"] > kept
    victim.kill()
    # No successor appears and the test keeps its handles on the peer and its transfer.
    until(lambda: consumer.do("resources")["mappings"] == kept, "the end of the mapping")
