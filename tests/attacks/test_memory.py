"""Memory that was adopted, freed, or lies beyond the fourth gigabyte."""

from __future__ import annotations

from pathlib import Path

import pytest

import pdkv
from attacks.far import until

BLOCKS = list(range(16))
SAME = [(block, block) for block in BLOCKS]
LARGE = {"layers": 2, "blocks": 64, "block_bytes": 512 << 10}  # far more than malloc takes from its heap


def test_adopted_memory(start):
    adopted = {"transports": ["shm", "cma"], "adopt": True, **LARGE}
    consumer = start("consumer", "cma", **adopted)
    producer = start("producer", "cma", seed=1, **adopted)
    consumer.do("connect", producer.address)
    producer.do("connect", consumer.address)
    _, reference = producer.do("export", BLOCKS)
    outcome = consumer.do("try_pull", reference, BLOCKS, require="shm", require_direct=True)
    assert (outcome["state"], outcome["path"]) == ("done", "shm"), outcome
    assert consumer.do("wrong", 1, SAME) == []
    _, offer = producer.do("offer", BLOCKS)
    consumer.do("stamp", 7, BLOCKS)
    assert consumer.do("outcome", consumer.do("push", offer, BLOCKS, require="shm"))["state"] == "done"
    assert producer.do("wrong", 7, SAME) == []
    # Freed at one side, it is gone at both, and nobody falls over it.
    _, late = producer.do("export", BLOCKS)
    producer.do("free_cache")
    until(lambda: producer.do("resources")["mappings"] == 1, "the end of the adopted memory")  # the peer's is left
    until(lambda: consumer.do("resources")["mappings"] == 1, "the end of its mapping")
    outcome = consumer.do("try_pull", late, BLOCKS)
    assert isinstance(outcome["error"], (pdkv.StaleReferenceError, pdkv.RegionError)), outcome
    assert outcome["destination"] == "untouched"


@pytest.mark.slow
def test_freed_while_a_peer_reads_over_an_emulated_lane(start):
    free_while_a_peer_reads(start, "ucx-tcp-put")


def test_freed_while_a_peer_reads(start, transport):
    free_while_a_peer_reads(start, transport)


def free_while_a_peer_reads(start, transport):
    consumer = start("consumer", transport, **LARGE)
    everything = list(range(64))
    # UCX doesn't say why a read failed, and on a lane it may fail before the owner's word comes.
    lost = (pdkv.PeerLostError,) if transport.startswith("ucx") else ()
    typed = (pdkv.StaleReferenceError, pdkv.RegionError, *lost)
    for _ in range(3):
        producer = start("producer", transport, seed=1, **LARGE)
        consumer.do("connect", producer.address)
        _, reference = producer.do("export", everything)
        producer.do("when_claimed", "free_cache")
        outcome = consumer.do("try_pull", reference, everything)
        assert outcome["quiesced"]
        if outcome["state"] == "done":
            assert consumer.do("wrong", 1, [(block, block) for block in everything]) == []
        else:
            assert isinstance(outcome["error"], typed), outcome
            assert outcome["destination"] in ("untouched", "invalid")
        assert producer.do("stats")["live_exports"] == 0
        assert producer.do("peer_names") == ["consumer"]


def available_bytes():
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(facts["MemAvailable"].split()[0]) << 10


@pytest.mark.slow
def test_blocks_beyond_32_bits(start, transport, rounds):
    # One layer of 4.5 GiB: offsets within it and its length need more than 32 bits. Private memory is sparse; mapping
    # a pool fills it.
    size = {"layers": 1, "blocks": 4608, "block_bytes": 1 << 20, "seed": None}
    if transport == "shm" and (rounds(1) == 1 or available_bytes() < 16 << 30):
        pytest.skip("takes 5 GiB of memory: runs with PDKV_ATTACK_ROUNDS=2 where 16 GiB are free")
    consumer = start("consumer", transport, **{**size, "pool": False})
    producer = start("producer", transport, **size)
    consumer.do("connect", producer.address)
    edge = [0, 4095, 4096, 4607]
    into = [4607, 4096, 4095, 1]
    producer.do("stamp", 1, edge)
    _, reference = producer.do("export", edge)
    outcome = consumer.do("try_pull", reference, into)
    assert outcome["state"] == "done", outcome
    assert consumer.do("wrong", 1, list(zip(edge, into, strict=True))) == []
    _, offer = producer.do("offer", [4600, 0])
    assert consumer.do("outcome", consumer.do("push", offer, [4607, 4096]))["state"] == "done"
    assert producer.do("wrong", 1, [(0, 4600), (4095, 0)]) == []
