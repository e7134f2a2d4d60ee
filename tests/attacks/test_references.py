"""References that are used up, taken back, altered or meant for others: typed errors, and never a foreign byte."""

from __future__ import annotations

import json
import random
import time

import chance
import pdkv
from attacks.far import until
from attacks.host import BACKGROUND
from places import host_of_its_own

BLOCKS = list(range(8))
INTO = list(range(63, 55, -1))
PAIRS = list(zip(BLOCKS, INTO, strict=True))
UNTOUCHED = [(block, block) for block in INTO]
LARGE = {"layers": 4, "blocks": 64, "block_bytes": 64 << 10}


def pair(start, transport, **settings):
    consumer = start("consumer", transport, **settings)
    producer = start("producer", transport, seed=1, **settings)
    consumer.do("connect", producer.address)
    return producer, consumer


def refused(consumer, error, reference, **options):
    outcome = consumer.do("try_pull", reference, INTO, **options)
    assert type(outcome["error"]) is error, outcome
    assert outcome["destination"] == "untouched"
    assert outcome["quiesced"]
    assert consumer.do("wrong", BACKGROUND, UNTOUCHED) == []


def test_used_released_expired_and_foreign(start, transport):
    producer, consumer = pair(start, transport)
    _, used = producer.do("export", BLOCKS, digest=b"prompt")
    assert consumer.do("try_pull", used, INTO, digest=b"prompt")["state"] == "done"
    assert consumer.do("wrong", 1, PAIRS) == []
    consumer.do("stamp", BACKGROUND)
    refused(consumer, pdkv.ReferenceUsedError, used)
    number, released = producer.do("export", BLOCKS)
    producer.do("release", number)
    refused(consumer, pdkv.ReferenceReleasedError, released)
    number, expired = producer.do("export", BLOCKS, lease_s=0.01)
    until(lambda: producer.do("export_state", number)[0] == "expired", "the end of the lease")
    refused(consumer, pdkv.ReferenceExpiredError, expired)
    _, other = producer.do("export", BLOCKS, digest=b"prompt")
    refused(consumer, pdkv.ReferenceDigestError, other, digest=b"another prompt")
    assert consumer.do("try_pull", other, INTO, digest=b"prompt")["state"] == "done"
    assert producer.do("stats")["live_exports"] == 0


def flips(reference):
    """The reference with one bit flipped, for every bit of its hexadecimal fields, numbers and names."""
    fields = json.loads(reference)
    for name, value in fields.items():
        if isinstance(value, int):
            width = 64 if name in ("cache", "num_tokens") else 32
            others = [value ^ (1 << bit) for bit in range(width)]
        elif name in ("incarnation", "export_id", "digest", "fingerprint", "tag"):
            raw = bytes.fromhex(value)
            number = int.from_bytes(raw, "big")
            others = [(number ^ (1 << bit)).to_bytes(len(raw), "big").hex() for bit in range(8 * len(raw))]
        else:
            others = [
                value[:at] + chr(ord(letter) ^ (1 << bit)) + value[at + 1 :]
                for at, letter in enumerate(value)
                for bit in range(7)
            ]
        yield from ((name, json.dumps({**fields, name: other})) for other in others)


# `LayoutError`: fewer blocks than are wanted. `UnsupportedError`: a later format. `ConfigError`: the other kind.
TYPED = {
    "ReferenceForgedError",
    "ReferenceRestartedError",
    "ReferenceUnknownError",
    "LayoutError",
    "UnsupportedError",
    "ConfigError",
}


def test_every_flipped_bit_is_refused(start, transport):
    producer, consumer = pair(start, transport)
    _, reference = producer.do("export", BLOCKS, digest=b"digest of 16 byte", num_tokens=100, lease_s=600)
    altered = list(flips(reference))
    assert len(altered) > 1000
    found = consumer.do("try_many", [text for _, text in altered], INTO)
    for (name, text), (error, state, destination) in zip(altered, found, strict=True):
        assert error in TYPED, (name, text, error)
        assert state in ("refused", "failed")
        assert destination == "untouched", (name, text)
    assert consumer.do("wrong", BACKGROUND, UNTOUCHED) == []
    assert producer.do("stats")["live_claims"] == 0
    assert consumer.do("try_pull", reference, INTO)["state"] == "done"
    assert consumer.do("wrong", 1, PAIRS) == []


def test_released_under_a_pull(start, transport):
    producer, consumer = pair(start, transport, **LARGE)
    everything = list(range(64))
    for _ in range(40):
        number, reference = producer.do("export", everything)
        producer.do("when_claimed", "release", number)
        outcome = consumer.do("try_pull", reference, everything)
        assert outcome["quiesced"]
        if outcome["state"] == "done":
            assert consumer.do("wrong", 1, [(block, block) for block in everything]) == []
            continue
        assert isinstance(outcome["error"], pdkv.ReferenceReleasedError), outcome
        assert outcome["destination"] in ("untouched", "invalid")
        if outcome["destination"] == "invalid":
            break
    else:
        raise AssertionError("no pull was met on its way")
    until(lambda: producer.do("export_state", number) == ("released", True), "the release")
    assert producer.do("stats")["live_claims"] == 0


def test_recycled_blocks_never_pass_for_the_old_ones(start, transport, rounds):
    producer, consumer = pair(start, transport, **LARGE)
    everything = list(range(64))
    seed = chance.seed()
    print("seed", seed)  # noqa: T201 - shown when the test fails
    dice = random.Random(seed)
    took_s = 0.01
    for generation in range(1, rounds(25) + 1):
        producer.do("stamp", generation)
        number, reference = producer.do("export", everything)
        begun = time.monotonic()
        consumer.post("try_pull", reference, everything)
        # The release falls anywhere from before the claim to after the end.
        producer.do("recycle", number, dice.random() * 1.5 * took_s, generation + 500, everything)
        outcome = consumer.result()
        took_s = max(0.001, min(1.0, time.monotonic() - begun))
        assert outcome["quiesced"]
        if outcome["state"] == "done":
            assert consumer.do("wrong", generation, [(block, block) for block in everything]) == []
        else:
            assert isinstance(outcome["error"], pdkv.ReferenceReleasedError), outcome
            assert outcome["destination"] in ("untouched", "invalid")


def test_restart_on_the_same_port(start, transport):
    consumer = start("consumer", transport)
    first = start("producer", transport, seed=1, listen=f"{host_of_its_own()}:0")
    address = first.address
    consumer.do("connect", address)
    _, old = first.do("export", BLOCKS)
    first.kill()
    second = start("producer", transport, seed=2, listen=address)
    assert second.address == address
    until(lambda: consumer.do("peer_names") == [], "the loss of the first life")
    consumer.do("connect", address)
    refused(consumer, pdkv.ReferenceRestartedError, old)
    _, new = second.do("export", BLOCKS)
    assert consumer.do("try_pull", new, INTO)["state"] == "done"
    assert consumer.do("wrong", 2, PAIRS) == []


def test_zero_blocks_and_blocks_named_twice(start, transport):
    producer, consumer = pair(start, transport)
    _, empty = producer.do("export", [])
    assert consumer.do("try_pull", empty, [])["state"] == "done"
    _, offer = consumer.do("offer", [])
    producer.do("connect", consumer.address)
    assert producer.do("outcome", producer.do("push", offer, []))["state"] == "done"
    _, reference = producer.do("export", BLOCKS)
    outcome = consumer.do("try_pull", reference, [*INTO[:-1], INTO[0]])
    assert isinstance(outcome["error"], pdkv.LayoutError)
    assert consumer.do("wrong", BACKGROUND, UNTOUCHED) == []
    # One block may be read twice.
    _, twice = producer.do("export", [3, 3])
    assert consumer.do("try_pull", twice, INTO[:2])["state"] == "done"
    assert consumer.do("wrong", 1, [(3, INTO[0]), (3, INTO[1])]) == []


def test_shutdown_while_pulls_run(start, transport):
    consumer = start("consumer", transport, **LARGE)
    quarters = [list(range(first, first + 16)) for first in range(0, 64, 16)]
    for _ in range(3):
        producer = start("producer", transport, seed=1, **LARGE)
        consumer.do("connect", producer.address)
        jobs = [(producer.do("export", part)[1], part) for part in quarters]
        producer.do("when_claimed", "shut_down")
        for number, part in zip(consumer.do("start_all", "pull", jobs), quarters, strict=True):
            if isinstance(number, Exception):
                assert isinstance(number, pdkv.PeerError)
                continue
            outcome = consumer.do("outcome", number)
            assert outcome["quiesced"]
            if outcome["state"] == "done":
                assert consumer.do("wrong", 1, [(block, block) for block in part]) == []
            else:
                assert isinstance(outcome["error"], (pdkv.PeerError, pdkv.ReferenceReleasedError)), outcome
                assert outcome["destination"] in ("untouched", "invalid")
        assert consumer.do("stats")["live_transfers"] == 0
