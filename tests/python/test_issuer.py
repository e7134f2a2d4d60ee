"""References issued ahead: minted in one process, exported late by another, claimed meanwhile by a third."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

import pdkv
from places import host_of_its_own

SHAPE = (2, 32, 1, 16, 64)

# Holds the memory and the engine; does what it is told, a line of JSON at a time.
WORKER = """
import json, sys
import numpy as np
import pdkv

engine = pdkv.Engine("worker", listen=sys.argv[1])
memory = np.frombuffer(engine.allocate(2 * 32 * 16 * 64, huge_pages=False), np.uint8).reshape(2, 32, 1, 16, 64)
memory[:] = np.arange(32, dtype=np.uint8)[None, :, None, None, None] + 100
cache = engine.register_kv_cache(memory, layout="LBHNC", block_tokens=16)
DO = {
    "issuer": lambda: cache.issuer().to_bytes().hex(),
    "stats": lambda: engine.stats,
    "ended": engine.take_ended,
    "export": lambda reference, blocks: cache.export(blocks, reference=reference).id,
}
for line in sys.stdin:
    what, *arguments = json.loads(line)
    try:
        answer = DO[what](*arguments)
    except pdkv.PdkvError as error:
        answer = type(error).__name__
    print(json.dumps(answer), flush=True)
"""

# Has no engine and no memory, only the bytes of the issuer: the scheduler's side of an instance.
SCHEDULER = """
import json, sys
import pdkv

issuer = pdkv.Issuer.from_bytes(bytes.fromhex(sys.stdin.readline()))
for line in sys.stdin:
    options = json.loads(line)
    print(issuer.issue(digest=options.pop("digest").encode(), **options).to_json(), flush=True)
"""


class Child:
    def __init__(self, process):
        self.process = process

    def tell(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def hear(self):
        return self.process.stdout.readline()

    def do(self, *command):
        self.tell(json.dumps(command))
        return json.loads(self.hear())

    def mint(self, num_blocks=4, num_tokens=60, digest="prompt", **options):
        self.tell(json.dumps({"num_blocks": num_blocks, "num_tokens": num_tokens, "digest": digest, **options}))
        return pdkv.Reference.from_json(self.hear())


@contextmanager
def child(script, *arguments):
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


@pytest.fixture
def instance():
    """The two processes of one producer, after the worker has handed its issuer over."""
    with child(WORKER, f"{host_of_its_own()}:0") as worker, child(SCHEDULER) as scheduler:
        scheduler.tell(worker.do("issuer"))
        yield worker, scheduler


class Consumer:
    def __init__(self, engine, **layout):
        self.engine = engine
        self.memory = np.zeros(SHAPE, np.uint8)
        self.cache = engine.register_kv_cache(self.memory, layout="LBHNC", block_tokens=16, **layout)


@pytest.fixture
def consumer():
    with pdkv.Engine("consumer", listen=None) as engine:
        yield Consumer(engine)


def until(holds):
    """The pytest timeout ends this if it never does."""
    while not holds():
        time.sleep(0.005)


def parked(worker, count):
    until(lambda: worker.do("stats")["parked_claims"] == count)


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_a_consumer_may_come_before_the_export(instance, consumer, transport):
    worker, scheduler = instance
    reference = scheduler.mint()
    consumer.engine.connect(reference.address)
    transfer = consumer.cache.pull(reference, [1, 2, 3, 4], digest=b"prompt", require=transport)
    parked(worker, 1)
    assert (transfer.state, worker.do("ended")) == ("claiming", [])
    assert worker.do("export", reference.to_json(), [9, 8, 7, 6]) == reference.export_id
    transfer.wait(60)
    assert (consumer.memory[:, 1:5, 0, 0, 0] == [109, 108, 107, 106]).all()
    ended = []
    until(lambda: ended.extend(worker.do("ended")) or ended)
    assert ended == [reference.export_id]
    assert worker.do("ended") == []
    with pytest.raises(pdkv.ReferenceUsedError):
        consumer.cache.pull(reference, [1, 2, 3, 4]).wait(60)


def test_or_after_it_as_ever(instance, consumer):
    worker, scheduler = instance
    reference = scheduler.mint(consumers=2)
    consumer.engine.connect(reference.address)
    assert worker.do("export", reference.to_json(), [9, 8, 7, 6]) == reference.export_id
    for _ in range(2):
        consumer.cache.pull(reference, [1, 2, 3, 4], digest=b"prompt").wait(60)
    assert (consumer.memory[:, 1:5, 0, 0, 0] == [109, 108, 107, 106]).all()


def test_nobody_waits_longer_than_its_own_deadline(instance, consumer):
    worker, scheduler = instance
    reference = scheduler.mint()
    consumer.engine.connect(reference.address)
    transfer = consumer.cache.pull(reference, [1, 2, 3, 4], timeout_s=0.2)
    with pytest.raises((pdkv.TransferTimeoutError, pdkv.ReferenceUnknownError)):
        transfer.wait(60)
    assert transfer.wait_quiesced(60)
    parked(worker, 0)
    assert worker.do("export", reference.to_json(), [9, 8, 7, 6]) == reference.export_id
    assert not consumer.memory.any()


def test_a_cancelled_claim_waits_no_more(instance, consumer):
    worker, scheduler = instance
    reference = scheduler.mint()
    consumer.engine.connect(reference.address)
    transfer = consumer.cache.pull(reference, [1, 2, 3, 4])
    parked(worker, 1)
    transfer.cancel()
    parked(worker, 0)
    consumer.cache.pull(reference, [1, 2, 3, 4])
    parked(worker, 1)


def test_a_consumer_that_is_gone_waits_no_more(instance):
    worker, scheduler = instance
    with pdkv.Engine("short", listen=None) as engine:
        short = Consumer(engine)
        reference = scheduler.mint()
        engine.connect(reference.address)
        short.cache.pull(reference, [1, 2, 3, 4])
        parked(worker, 1)
    parked(worker, 0)


def test_an_early_decline_ends_the_export_at_once(instance, consumer):
    worker, scheduler = instance
    reference = scheduler.mint()
    peer = consumer.engine.connect(reference.address)
    peer.reject(reference)
    # What is said on one channel arrives in order: once this is answered, the decline is known.
    with pytest.raises(pdkv.ReferenceUnknownError):
        peer.renew(reference, 60)
    assert worker.do("export", reference.to_json(), [9, 8, 7, 6]) == reference.export_id
    # Nobody claimed it and its lease is long: it was the decline that ended it, before the call returned.
    assert worker.do("ended") == [reference.export_id]


def test_what_is_exported_is_what_was_promised(instance):
    worker, scheduler = instance
    reference = scheduler.mint()
    assert worker.do("export", reference.to_json(), [1, 2, 3]) == "LayoutError"
    assert worker.do("export", reference.to_json(), [1, 2, 3, 99]) == "LayoutError"
    forged = json.loads(reference.to_json()) | {"num_tokens": 59}
    assert worker.do("export", json.dumps(forged), [1, 2, 3, 4]) == "ReferenceForgedError"
    assert worker.do("export", reference.to_json(), [1, 2, 3, 4]) == reference.export_id
    assert worker.do("export", reference.to_json(), [1, 2, 3, 4]) == "ReferenceUsedError"
    # More tokens than the blocks hold.
    assert worker.do("export", scheduler.mint(num_tokens=65).to_json(), [1, 2, 3, 4]) == "LayoutError"


def test_an_issuer_of_an_earlier_life_is_worth_nothing(instance, consumer):
    first, scheduler = instance
    old = scheduler.mint()
    first.process.kill()
    first.process.wait()
    with child(WORKER, old.address) as second:
        second.do("issuer")
        assert second.do("export", old.to_json(), [1, 2, 3, 4]) == "ReferenceRestartedError"
        peer = consumer.engine.connect(old.address)
        with pytest.raises(pdkv.ReferenceRestartedError):
            consumer.cache.pull(old, [1, 2, 3, 4], peer=peer)
        # With the life of the new engine written into it, it lacks the new engine's seal.
        posing = json.loads(old.to_json()) | {"incarnation": peer.incarnation}
        with pytest.raises(pdkv.ReferenceForgedError):
            consumer.cache.pull(json.dumps(posing), [1, 2, 3, 4]).wait(60)
        assert second.do("export", json.dumps(posing), [1, 2, 3, 4]) == "ReferenceForgedError"
        assert second.do("stats")["parked_claims"] == 0


@pytest.fixture
def cache():
    with pdkv.Engine("here") as engine:
        yield Consumer(engine).cache


def test_stated_values_must_agree(cache):
    def export(**stated):
        reference = cache.issuer().issue(num_blocks=2, num_tokens=20, digest=b"d", consumers=3)
        return cache.export([1, 2], reference=reference, **stated)

    export(num_tokens=20, digest=b"d", consumers=3)
    assert (export().reference.num_tokens, export().reference.digest) == (20, b"d")
    for stated, error, values in [
        ({"num_tokens": 32}, pdkv.ConfigError, "`20`.*`32`"),
        ({"digest": b""}, pdkv.ReferenceDigestError, "`64`.*``"),
        ({"consumers": 1}, pdkv.ConfigError, "`3`.*`1`"),
    ]:
        with pytest.raises(error, match=values):
            export(**stated)


def test_a_reference_is_for_the_cache_whose_issuer_minted_it(cache):
    with pdkv.Engine("two") as engine:
        one, two = Consumer(engine).cache, Consumer(engine).cache
        reference = one.issuer().issue(num_blocks=1, num_tokens=1)
        with pytest.raises(pdkv.ConfigError, match="cache"):
            two.export([1], reference=reference)
        with pytest.raises(pdkv.ReferenceRestartedError):
            cache.export([1], reference=reference)
        assert one.export([1], reference=reference).id == reference.export_id


def test_an_issuer_is_a_secret_that_travels_as_bytes(cache):
    issuer = cache.issuer()
    data = issuer.to_bytes()
    again = pdkv.Issuer.from_bytes(data)
    facts = (again.engine, again.address, again.incarnation, again.fingerprint)
    assert facts == (issuer.engine, issuer.address, issuer.incarnation, cache.fingerprint)
    assert again.to_bytes() == data
    key = data[12 + 16 + 8 + 32 :][:32]
    assert key.hex() not in repr(issuer)
    assert repr(issuer) == f"<pdkv.Issuer of cache {cache.id} at here ({issuer.address})>"
    with pytest.raises(TypeError):
        pickle.dumps(issuer)


@pytest.mark.parametrize("data", [b"", b"\0" * 200, b"pdkv-issuer\1", b"{}", bytes(range(256)) * 20])
def test_garbage_is_no_issuer(data):
    with pytest.raises(pdkv.ConfigError, match="no issuer"):
        pdkv.Issuer.from_bytes(data)


def test_a_changed_issuer_is_refused_or_its_references_are(cache):
    data = cache.issuer().to_bytes()
    names = len("here") + len(cache.issuer().address) + 2 * 2
    refusals = (pdkv.ConfigError, pdkv.UnsupportedError, pdkv.StaleReferenceError, pdkv.ReferenceMismatchError)
    for at in range(len(data) - names):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(refusals):
            cache.export([1], reference=pdkv.Issuer.from_bytes(changed).issue(num_blocks=1, num_tokens=1))


def test_what_ended_before_anybody_asked_is_not_told():
    with pdkv.Engine("quiet") as engine:
        cache = Consumer(engine).cache
        cache.export([1]).release()
        assert engine.take_ended() == []
        export, offer = cache.export([1]), cache.offer([2])
        export.release()
        offer.release()
        assert engine.take_ended() == [export.id, offer.reference.export_id]
        assert engine.take_ended() == []
        cache.export([1], lease_s=0.01).wait(60)
        assert len(engine.take_ended()) == 1


def test_a_closed_engine_issues_nothing(cache):
    with pdkv.Engine("short") as engine:
        gone = Consumer(engine).cache
        deregistered = Consumer(engine).cache
        deregistered.deregister()
        with pytest.raises(pdkv.RegionError):
            deregistered.issuer()
    with pytest.raises(pdkv.ClosedError):
        gone.issuer()
