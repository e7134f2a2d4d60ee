"""Producers in other processes that are killed, stopped and restarted: every load ends once, and the next one works."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
from pathlib import Path

import pytest

import chance
from connectors.far import far
from connectors.sides import consuming, pull, until
from pdkv.connectors.core.load import Load
from pdkv.connectors.core.work import Results, Work


@pytest.fixture
def consumer():
    with consuming() as side:
        yield side


def load(consumer, producer, request_id, references, *into, **how):
    consumer.worker.carry(Work(pulls=(pull(producer.address, request_id, references, *into, **how),)))


def test_blocks_come_from_another_process(consumer):
    with far() as producer:
        references, value = producer.export("p-1", (5, 6, 9))
        load(consumer, producer, "d-1", references, (1, 2, 3))
        consumer.until_received("d-1")
        producer.until_sent("p-1")
        assert not consumer.failed
        assert consumer.holds(0, (1, 2, 3), value)


def test_two_producers_at_once(consumer):
    with far(engine_id="p") as one, far(engine_id="q") as other:
        first, first_value = one.export("p-1", (5, 6))
        second, second_value = other.export("p-1", (5, 6))
        load(consumer, one, "d-1", first, (1, 2))
        load(consumer, other, "d-2", second, (3, 4))
        consumer.until_received("d-1", "d-2")
        assert consumer.holds(0, (1, 2), first_value)
        assert consumer.holds(0, (3, 4), second_value)
        # What one has issued is worth nothing at the other.
        third, _ = one.export("p-2", (5, 6))
        load(consumer, other, "d-3", third, (7, 8))
        consumer.until_received("d-3")
        assert consumer.failed == {"d-3"}


def test_a_killed_producer_fails_what_runs(consumer):
    with far() as producer:
        references = producer.mint((5, 6))
        load(consumer, producer, "d-1", references, (1, 2))
        until(lambda: producer.ask("stats")["peers"])
        until(lambda: consumer.worker._engine.stats["live_transfers"])
        producer.kill()
        consumer.until_received("d-1")
        assert consumer.failed == {"d-1"}
        assert consumer.failed_blocks == {1, 2}
        assert consumer.worker._engine.stats["live_transfers"] == 0
        # And what comes after it, quickly.
        for number in range(100):
            load(consumer, producer, f"late-{number}", references, (3, 4))
        consumer.until_received(*(f"late-{number}" for number in range(100)))
        assert len(consumer.failed) == 101


def test_a_stopped_producer_fails_what_runs_at_its_deadline():
    with consuming(transfer_timeout=5.0) as consumer, far() as producer:
        references, _ = producer.export("p-1", (5, 6))
        load(consumer, producer, "d-0", references, ())
        producer.until_sent("p-1")
        second, _ = producer.export("p-2", (5, 6))
        third, value = producer.export("p-3", (7, 8))
        producer.stop()
        load(consumer, producer, "d-1", second, (1, 2))
        consumer.until_received("d-1")
        assert consumer.failed == {"d-1"}
        assert consumer.look() == Results()
        producer.go_on()
        # It is as good as before.
        assert producer.sent() == ["p-1"]
    with consuming(transfer_timeout=60.0) as consumer, far() as producer:
        third, value = producer.export("p-3", (7, 8))
        producer.stop()
        load(consumer, producer, "d-1", third, (1, 2))
        assert consumer.look() == Results()
        producer.go_on()
        consumer.until_received("d-1")
        assert consumer.holds(0, (1, 2), value)


def test_a_stopped_producer_stops_nobody_else(consumer):
    with far(engine_id="p") as stopped, far(engine_id="q") as other:
        references, _ = stopped.export("p-1", (5, 6))
        load(consumer, stopped, "d-0", stopped.mint(()), ())  # connects nothing: there is nothing to tell
        stopped.stop()
        for number in range(50):
            load(consumer, stopped, f"s-{number}", references, (1, 2))
        for number in range(20):
            good, value = other.export(f"p-{number}", (5, 6))
            load(consumer, other, f"d-{number + 1}", good, (3, 4))
            consumer.until_received(f"d-{number + 1}")
            assert consumer.holds(0, (3, 4), value)
        assert not any(name.startswith("s-") for name in consumer.received) or consumer.failed
        for number in range(50):
            consumer.worker.carry(Work(cancels=(f"s-{number}",)))
        consumer.until_received(*(f"s-{number}" for number in range(50)))


def test_a_restart_on_the_same_port_just_works(consumer):
    with far() as producer:
        old, value = producer.export("p-1", (5, 6))
        load(consumer, producer, "d-1", old, (1, 2))
        consumer.until_received("d-1")
        stale, _ = producer.export("p-2", (5, 6))
        port, engine_port = producer.port, int(producer.engine.rpartition(":")[2])
        producer.kill()
    with far(port=port, engine_port=engine_port, blocks=32) as producer:
        assert producer.port == port
        # Another number of blocks is no difference in meaning; a reference of its earlier life is refused.
        load(consumer, producer, "d-2", stale, (3, 4))
        consumer.until_received("d-2")
        assert consumer.failed == {"d-2"}
        references, value = producer.export("p-1", (7, 8))
        load(consumer, producer, "d-3", references, (5, 6))
        consumer.until_received("d-3")
        assert consumer.failed == {"d-2"}
        assert consumer.holds(0, (5, 6), value)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"layers": 3}, "layers of group 0 is `2` here and `3` there"),
        ({"model": "other"}, "model of group 0 is `m#0` here and `other#0` there"),
        ({"engine_id": "q"}, "engine_id `p`, but `q` answers"),
    ],
)
def test_a_restart_as_something_else_is_refused_with_what_differs(consumer, caplog, how, says):
    with far() as producer:
        references, _ = producer.export("p-1", (5, 6))
        load(consumer, producer, "d-1", references, (1, 2))
        consumer.until_received("d-1")
        port, address = producer.port, producer.address
        producer.kill()
    with far(port=port, **how) as producer:
        references, _ = producer.export("p-1", (5, 6))
        producer.address = address
        load(consumer, producer, "d-2", references, (1, 2))
        consumer.until_received("d-2")
        assert consumer.failed == {"d-2"}
        assert says in caplog.text


def loads_left():
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Load)]


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_five_hundred_loads_and_random_cancels_are_each_reported_once(caplog):
    caplog.set_level(logging.INFO, "test")
    seed = chance.seed()
    logging.getLogger("test").info("seed %d", seed)  # pytest shows it should this fail
    dice = random.Random(seed)
    with consuming(blocks=512) as consumer, far(blocks=512) as producer:
        threads = resident = None
        for batch in range(5):
            expected = {}
            for number in range(100):
                name = f"{batch}-{number}"
                ids, into = (dice.randrange(512),), tuple(dice.sample(range(512), 1))
                late = dice.random() < 0.2
                references = producer.mint(ids) if late else producer.export(f"p-{name}", ids)[0]
                load(consumer, producer, f"d-{name}", references, () if dice.random() < 0.1 else into)
                if dice.random() < 0.4:
                    consumer.worker.carry(Work(cancels=(f"d-{name}",)))
                if late:
                    producer.order(f"p-{name}", references, ids)
                if dice.random() < 0.3:
                    consumer.worker.carry(Work(cancels=(f"d-{batch}-{dice.randrange(number + 1)}",)))
                if dice.random() < 0.5:
                    consumer.look()
                expected[name] = None
            consumer.until_received(*(f"d-{name}" for name in expected))
            # Cancelled ones are given back, so no export is left to its lease.
            producer.until_sent(*(f"p-{name}" for name in expected))
            if batch == 1:
                threads, resident = threading.active_count(), resident_mb()
        assert len(consumer.received) == len(set(consumer.received)) == 500
        assert 0 < len(consumer.failed) < 500
        assert consumer.look() == Results()
        counts = consumer.counts()
        assert counts["num_cancelled"] == len(consumer.failed), counts
        assert not counts.keys() & {"num_failed_transfers", "num_recomputed_requests"}
        stats = producer.ask("stats")
        assert stats["live_exports"] == stats["live_claims"] == 0
        assert "num_kv_expired_reqs" not in stats
        pulls = consumer.worker._pulls
        assert not any((pulls._open, pulls._transfers, pulls._settling, pulls._waiting, pulls._ended))
        # A thread that has just told the producer something may still be there, with the job in its hands.
        until(lambda: threading.active_count() <= threads, f"as few threads as `{threads}`")
        until(lambda: not loads_left(), "the end of all loads")
        assert resident_mb() < resident + 30
