"""Leases of requests that wait: alive as long as they are watched, and nobody's trouble once they are not."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from connectors.sides import consuming, producing, pull, until
from connectors.test_directory import impostor
from patience import follows_the_machine
from pdkv.connectors.core import leases as module
from pdkv.connectors.core.work import ProducerAddress, Watch, Work
from pdkv.errors import ReferenceExpiredError, ReferenceUnknownError, ReferenceUsedError, TransferTimeoutError

# Renewed every 0.1 s. What is exported has a lease that is much longer, so nothing here depends on being in time.
SHORT_S = 0.3


def counted(consumer, monkeypatch):
    """How often each watched request's leases were renewed."""
    leases, counts = consumer.worker._leases, Counter()
    real = leases._renew

    def renew(watched, peer):
        names = [name for name, each in leases._watched.items() if each is watched]
        real(watched, peer)
        counts.update(names)

    monkeypatch.setattr(leases, "_renew", renew)
    return counts


@pytest.fixture
def renewed(consumer, monkeypatch):
    return counted(consumer, monkeypatch)


def watch(consumer, producer, request_id, references, lease_s=SHORT_S):
    consumer.worker.carry(Work(watches=(Watch(request_id, producer.address, references, lease_s),)))


@follows_the_machine
def test_a_watched_lease_lives_until_the_pull(monkeypatch, patience_s):
    # Asked for so often that a machine would have to stand still for seconds to be late.
    monkeypatch.setattr(module, "_RATE", 40)
    with producing(groups=3) as producer, consuming(groups=3) as consumer:
        references, value = producer.export("p-1", (5, 6), (), (7,), lease_s=patience_s)
        watch(consumer, producer, "d-1", references, patience_s)
        time.sleep(1.5 * patience_s)
        assert not producer.look().sent
        consumer.worker.carry(Work(pulls=(pull(producer.address, "d-1", references, (1, 2), (), (3,)),)))
        consumer.until_received("d-1")
        producer.until_sent("p-1")
        assert not consumer.failed
        assert consumer.holds(0, (1, 2), value)
        assert consumer.holds(2, (3,), value)
        assert not producer.counts()
        assert not consumer.counts()


@follows_the_machine
def test_a_lease_that_nobody_watches_ends(monkeypatch, patience_s):
    with producing() as producer, consuming() as consumer:
        renewed = counted(consumer, monkeypatch)
        references, _ = producer.export("p-1", (5, 6), lease_s=patience_s)
        watch(consumer, producer, "d-1", references)
        until(lambda: renewed["d-1"] >= 2)
        consumer.worker.carry(Work(unwatches=("d-1", "d-unknown")))
        producer.until_sent("p-1")
        assert producer.counts() == {"num_kv_expired_reqs": 1}


def test_a_pull_ends_the_watch(producer, consumer, renewed):
    references, _ = producer.export("p-1", (5, 6))
    watch(consumer, producer, "d-1", references)
    until(lambda: renewed["d-1"] >= 2)
    consumer.worker.carry(Work(pulls=(pull(producer.address, "d-1", references, (1, 2)),)))
    consumer.until_received("d-1")
    assert not consumer.failed
    assert not consumer.worker._leases._watched
    until(lambda: "pdkv-leases" not in {thread.name for thread in threading.enumerate()})


def test_watching_connects_to_those_that_were_reached_before(producer, consumer):
    references, _ = producer.export("p-1", (5, 6))
    watch(consumer, producer, "d-1", references, lease_s=3600.0)
    # Whoever sends a request can name places: that alone dials nothing.
    assert not consumer.worker._dialler._queues
    consumer.worker.carry(Work(pulls=(pull(producer.address, "d-1", references, (1, 2)),)))
    consumer.until_received("d-1")
    for queue in consumer.worker._dialler._queues.values():
        queue.line.peer.close()
    until(lambda: not consumer.worker._engine.peers)
    references, _ = producer.export("p-2", (5, 6))
    watch(consumer, producer, "d-2", references, lease_s=3600.0)
    until(lambda: consumer.worker._engine.peers)


def test_an_expired_lease_is_left_alone(producer, consumer):
    references, _ = producer.export("p-1", (5, 6), lease_s=0.05)
    producer.until_sent("p-1")
    watch(consumer, producer, "d-1", references)
    until(lambda: consumer.counts() == {"num_failed_notifications": 1})
    # Its thread has nothing to do.
    until(lambda: "pdkv-leases" not in {thread.name for thread in threading.enumerate()})


def test_a_lease_may_be_watched_before_its_export(producer, consumer, renewed):
    references = producer.mint(((5, 6),))
    watch(consumer, producer, "d-1", references, 60.0)
    leases = consumer.worker._leases
    # As when the first renewal comes before the export: what the owner doesn't know yet it may be about to export.
    leases._failed(leases._watched["d-1"], ReferenceUnknownError("not yet"))
    assert not leases._watched["d-1"].ended
    leases._failed(leases._watched["d-1"], ReferenceUnknownError("never"))
    assert leases._watched["d-1"].ended


def test_a_dead_owner_is_counted_and_asked_again(producer, consumer):
    references, _ = producer.export("p-1", (5, 6))
    nobody = ProducerAddress("p", "127.0.0.1", 1)
    consumer.worker.carry(Work(watches=(Watch("d-1", nobody, references, 0.1),)))
    total = 0

    def more():
        nonlocal total
        total += consumer.counts().get("num_failed_notifications", 0)
        return total >= 3

    until(more)
    consumer.worker.carry(Work(unwatches=("d-1",)))


def test_what_is_no_reference_is_not_watched(producer, consumer):
    for references in ((), (("{}",),), (("a", "b"),)):
        watch(consumer, producer, "d-1", references)
    assert not consumer.worker._leases._watched


def test_an_id_that_is_watched_again_is_watched_once(producer, consumer, renewed):
    first, _ = producer.export("p-1", (5, 6), lease_s=1.0)
    second, _ = producer.export("p-2", (7,))
    watch(consumer, producer, "d-1", first)
    watch(consumer, producer, "d-1", second)
    producer.until_sent("p-1")
    until(lambda: renewed["d-1"])
    assert "p-2" not in producer.sent


def test_a_silent_owner_delays_nobody_elses_lease(producer, consumer, renewed):
    """One that accepts and never answers, and a hundred requests that wait for it."""
    references, _ = producer.export("p-1", (5, 6))
    with impostor(b"", hang_up=False) as port:
        silent = ProducerAddress("p", "127.0.0.1", port)
        watches = tuple(Watch(f"s-{number}", silent, references, 30.0) for number in range(100))
        consumer.worker.carry(Work(watches=watches))
        watch(consumer, producer, "d-1", references)
        # Before the silent one has been given up even once, which takes 5 s of waiting for each of the hundred.
        until(lambda: renewed["d-1"] >= 3)
        assert not any(renewed[f"s-{number}"] for number in range(100))
        consumer.worker.carry(Work(unwatches=tuple(f"s-{number}" for number in range(100))))


class SlowPeer:
    incarnation = "life"
    alive = True

    def __init__(self):
        self.asked = 0

    def renew(self, reference, lease_s, *, timeout_s):
        self.asked += 1
        raise TransferTimeoutError("no answer")


class GonePeer(SlowPeer):
    def renew(self, reference, lease_s, *, timeout_s):
        self.asked += 1
        raise ReferenceExpiredError("gone")


def test_an_owner_that_did_not_answer_is_not_asked_for_everybody(producer, consumer):
    references, _ = producer.export("p-1", (5, 6))
    leases, peer = consumer.worker._leases, SlowPeer()
    for number in range(50):
        watch(consumer, producer, f"d-{number}", references, lease_s=60.0)
    assert [thread.name for thread in threading.enumerate()].count("pdkv-leases") == 1
    for watched in list(leases._watched.values()):
        leases._renew(watched, peer)
    assert peer.asked == 1
    assert consumer.counts() == {"num_failed_notifications": 50}
    assert len(leases._watched) == 50


def test_a_pull_that_is_over_and_not_looked_at_is_no_failure(producer, consumer):
    references, _ = producer.export("p-1", (5, 6))
    leases = consumer.worker._leases
    watch(consumer, producer, "d-1", references, lease_s=60.0)
    leases._failed(leases._watched["d-1"], ReferenceUsedError("you have had it"))
    assert leases._watched["d-1"].ended
    assert not consumer.counts()


def test_a_lost_lease_costs_the_others_nothing(producer, consumer):
    references, _ = producer.export("p-1", (5, 6))
    leases = consumer.worker._leases
    watch(consumer, producer, "d-1", references, lease_s=60.0)
    watch(consumer, producer, "d-2", references, lease_s=60.0)
    leases._renew(leases._watched["d-1"], GonePeer())
    assert leases._watched["d-1"].ended
    assert not leases._watched["d-2"].ended


def test_no_thread_to_be_had_is_survived(producer, consumer, monkeypatch, caplog):
    references, _ = producer.export("p-1", (5, 6))
    real = threading.Thread.start

    def none_left(thread):
        if thread.name == "pdkv-leases":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    watch(consumer, producer, "d-1", references, lease_s=60.0)
    assert "no thread to keep leases" in caplog.text
    monkeypatch.undo()
    watch(consumer, producer, "d-2", references, lease_s=60.0)
    assert "pdkv-leases" in {thread.name for thread in threading.enumerate()}
    consumer.worker._leases.close(30.0)


def test_close_ends_the_thread(producer):
    with consuming() as consumer:
        references, _ = producer.export("p-1", (5, 6))
        watch(consumer, producer, "d-1", references)
    until(lambda: "pdkv-leases" not in {thread.name for thread in threading.enumerate()})
    watch(consumer, producer, "d-1", references)
    assert "pdkv-leases" not in {thread.name for thread in threading.enumerate()}
