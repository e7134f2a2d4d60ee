"""Exports of a rank: pinned when ordered, reported once, when nobody will read the blocks any more or ever could."""

from __future__ import annotations

import json

import pytest

from connectors.sides import BLOCKS, producing, pull, until
from pdkv.connectors.core.work import Decline, ExportOrder, Results, Work


def load(consumer, producer, request_id, references, *into):
    consumer.worker.carry(Work(pulls=(pull(producer.address, request_id, references, *into),)))


def test_an_export_of_nothing_is_over_at_once(producer):
    producer.export("p-1", ())
    producer.until_sent("p-1")


def test_nobody_comes_and_the_lease_ends(producer):
    producer.export("p-1", (1, 2), lease_s=0.05)
    producer.until_sent("p-1")
    assert producer.counts() == {"num_kv_expired_reqs": 1}


def test_an_expired_request_counts_once():
    with producing(groups=2) as producer:
        producer.export("p-1", (1, 2), (3,), lease_s=0.05)
        producer.until_sent("p-1")
        assert producer.counts() == {"num_kv_expired_reqs": 1}


@pytest.mark.parametrize(
    ("block_ids", "what"),
    [(((1, BLOCKS),), "out of range"), (((1, 2, 3),), "another number"), (((1, 2), (3,)), "another group")],
)
def test_an_export_that_can_not_be_is_reported_at_once(producer, caplog, block_ids, what):
    references = producer.mint(((1, 2),))
    producer.worker.carry(Work(exports=(ExportOrder("p-1", references, block_ids, 60.0),)))
    producer.until_sent("p-1")
    assert producer.counts() == {"num_failed_exports": 1}
    assert "`p-1` is not exported" in caplog.text


def test_an_export_half_of_which_can_not_be_is_ended(caplog):
    with producing(groups=2) as producer:
        references = producer.mint(((1, 2), (3,)))
        producer.worker.carry(Work(exports=(ExportOrder("p-1", references, ((1, 2), (BLOCKS,)), 60.0),)))
        producer.until_sent("p-1")
        assert producer.worker._engine.stats["live_exports"] == 0


def test_the_same_order_twice_is_one_export(producer, consumer, caplog):
    references, value = producer.export("p-1", (1, 2))
    producer.worker.carry(Work(exports=(ExportOrder("p-1", references, ((1, 2),), 60.0),)))
    # The second one is refused, and the blocks of the first are still spoken for.
    assert producer.look() == Results()
    load(consumer, producer, "d-1", references, (5, 6))
    consumer.until_received("d-1")
    producer.until_sent("p-1")
    assert producer.look() == Results()
    assert consumer.holds(0, (5, 6), value)


def test_an_id_that_is_exported_again_is_sent_when_both_have_ended(producer, consumer):
    first, _ = producer.export("p-1", (1, 2))
    second, _ = producer.export("p-1", (3, 4))
    load(consumer, producer, "d-1", first, (5, 6))
    consumer.until_received("d-1")
    until(lambda: producer.worker._engine.stats["live_exports"] == 1)
    assert producer.look() == Results()
    consumer.worker.carry(Work(declines=(Decline(producer.address, second),)))
    producer.until_sent("p-1")


def test_an_engine_gives_its_own_exports_back_without_connecting_to_itself(producer):
    references, _ = producer.export("p-1", (5, 6))
    edited = json.dumps(json.loads(references[0][0]) | {"num_tokens": 31})
    producer.worker.carry(Work(declines=(Decline(producer.address, ((edited,),)),)))
    assert producer.worker._engine.stats["live_exports"] == 1
    producer.worker.carry(Work(declines=(Decline(producer.address, references),)))
    producer.until_sent("p-1")
    producer.worker.carry(Work(declines=(Decline(producer.address, references),)))
    assert producer.look() == Results()
    assert producer.worker._engine.peers == []
