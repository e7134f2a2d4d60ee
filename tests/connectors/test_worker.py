"""The worker side with real engines: exports and pulls from their orders to what is reported."""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from connectors.sides import BLOCKS, DIGEST, consuming, producing, pull, until
from pdkv._core import Issuer
from pdkv.connectors.core.caches import GroupCache
from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.directory import Directory
from pdkv.connectors.core.load import Load
from pdkv.connectors.core.work import (
    Decline,
    ExportOrder,
    ProducerAddress,
    PullOrder,
    Refusal,
    Results,
    Work,
)
from pdkv.connectors.core.worker import WorkerSide
from pdkv.engine import Engine
from pdkv.errors import ConfigError, ReferenceExpiredError, TransferCancelledError


def load(consumer, producer, request_id, references, *into, **how):
    consumer.worker.carry(Work(pulls=(pull(producer.address, request_id, references, *into, **how),)))


def test_nothing_in_flight_is_nothing_reported(consumer):
    consumer.worker.carry(Work.NOTHING)
    assert consumer.worker.results() == Results()
    assert consumer.worker.stats.snapshot_and_reset() is None


def test_blocks_arrive_and_both_sides_report_once(producer, consumer):
    references, value = producer.export("p-1", (5, 6, 9))
    load(consumer, producer, "d-1", references, (1, 2, 3))
    consumer.until_received("d-1")
    producer.until_sent("p-1")
    assert not consumer.failed
    assert consumer.holds(0, (1, 2, 3), value)
    assert consumer.look() == producer.look() == Results()


def test_a_connected_producer_is_pulled_from_at_once(producer, consumer):
    for number in range(20):
        references, value = producer.export(f"p-{number}", (5, 6))
        load(consumer, producer, f"d-{number}", references, (1, 2))
        consumer.until_received(f"d-{number}")
        assert consumer.holds(0, (1, 2), value)
    assert len(consumer.worker._engine.peers) == 1
    snapshot = consumer.worker.stats.snapshot_and_reset()
    assert len(snapshot["xfer_time_seconds"]) == 20
    assert snapshot["bytes_transferred"] == [2 * 2 * 2 * 16 * 64 * 4] * 20
    assert snapshot["paths"] == {"inproc": 20}
    assert all(
        post <= whole for post, whole in zip(snapshot["post_time_seconds"], snapshot["xfer_time_seconds"], strict=True)
    )


def test_a_part_is_paired_by_position(producer, consumer):
    references, value = producer.export("p-1", (5, 6, 9, 11))
    load(consumer, producer, "d-1", references, (3, 1), first_blocks=(2,))
    consumer.until_received("d-1")
    assert not consumer.failed
    assert consumer.holds(0, (3, 1), value, first=2)


def test_all_groups_are_one_load():
    with producing(groups=3) as producer, consuming(groups=3) as consumer:
        references, value = producer.export("p-1", (1, 2, 3), (4,), (5, 6))
        load(consumer, producer, "d-1", references, (7, 8, 9), (10,), (11, 12))
        consumer.until_received("d-1")
        producer.until_sent("p-1")
        for group, ids in enumerate(((7, 8, 9), (10,), (11, 12))):
            assert consumer.holds(group, ids, value), group


def test_references_of_groups_are_not_interchangeable():
    with producing(groups=2) as producer, consuming(groups=2) as consumer:
        references, _ = producer.export("p-1", (1, 2), (3, 4))
        load(consumer, producer, "d-1", (references[0][::-1],), (7, 8), (10, 11))
        consumer.until_received("d-1")
        assert consumer.failed == {"d-1"}
        assert not any(tensor.any() for tensors in consumer.pages for tensor in tensors.values())


def test_groups_without_blocks_are_left_out():
    with producing(groups=3) as producer, consuming(groups=3) as consumer:
        # The window of the second group has left everything behind; the consumer has all of the third.
        references, value = producer.export("p-1", (1, 2), (), (5, 6))
        load(consumer, producer, "d-1", references, (7, 8), (), ())
        consumer.until_received("d-1")
        producer.until_sent("p-1")
        assert not consumer.failed
        assert consumer.holds(0, (7, 8), value)
        assert consumer.counts() == {"num_declined": 1}


def test_a_pull_of_nothing_gives_the_export_back(producer, consumer):
    references, _ = producer.export("p-1", (1, 2))
    load(consumer, producer, "d-1", references, ())
    consumer.look()
    assert consumer.received == ["d-1"]
    assert not consumer.failed
    producer.until_sent("p-1")


def test_a_pull_of_nothing_succeeds_whoever_is_dead(consumer, producer):
    references, _ = producer.export("p-1", (1, 2))
    nobody = ProducerAddress("p", "127.0.0.1", 1)
    consumer.worker.carry(Work(pulls=(pull(nobody, "d-1", references, ()),)))
    consumer.look()
    assert consumer.received == ["d-1"]
    assert not consumer.failed
    until(lambda: consumer.counts() == {"num_failed_notifications": 1})


def test_a_decline_frees_the_blocks(producer, consumer):
    first, _ = producer.export("p-1", (1, 2))
    second, _ = producer.export("p-2", (3,))
    consumer.worker.carry(Work(declines=(Decline(producer.address, first),)))
    producer.until_sent("p-1")
    consumer.worker.carry(Work(declines=(Decline(producer.address, second),)))
    producer.until_sent("p-2")
    assert consumer.counts() == {"num_declined": 2}


def test_a_pull_may_come_before_the_export(producer, consumer):
    references = producer.mint(((3, 4),))
    load(consumer, producer, "d-1", references, (1, 2))
    until(lambda: producer.worker._engine.stats["peers"])
    producer.fill(0, (3, 4), 77)
    producer.worker.carry(Work(exports=(ExportOrder("p-1", references, ((3, 4),), 60.0),)))
    consumer.until_received("d-1")
    producer.until_sent("p-1")
    assert not consumer.failed
    assert consumer.holds(0, (1, 2), 77)


def test_a_decline_may_come_before_the_export(producer, consumer):
    references = producer.mint(((3, 4),))
    consumer.worker.carry(Work(declines=(Decline(producer.address, references),)))
    until(lambda: consumer.counts() == {"num_declined": 1})
    time.sleep(0.1)  # the decline is on its way; should the export be first, it ends all the same
    producer.worker.carry(Work(exports=(ExportOrder("p-1", references, ((3, 4),), 60.0),)))
    producer.until_sent("p-1")


def test_an_id_that_was_reported_may_be_used_again(producer, consumer):
    for _ in range(2):
        references, value = producer.export("p-1", (1, 2))
        load(consumer, producer, "d-1", references, (5, 6))
        consumer.until_received("d-1")
        producer.until_sent("p-1")
        assert consumer.holds(0, (5, 6), value)
        consumer.received.clear()
        producer.sent.clear()


def test_a_refusal_is_a_failed_load(consumer):
    consumer.worker.carry(Work(refusals=(Refusal("d-1", "reference_forged", "it contradicts itself", (4, 5)),)))
    consumer.look()
    assert (consumer.received, consumer.failed, consumer.failed_blocks) == (["d-1"], {"d-1"}, {4, 5})
    assert consumer.counts() == {"num_recomputed_requests": 1, "num_refused_references": 1}


def refused(consumer, blocks=(1, 2), **counts):
    consumer.until_received("d-1")
    assert consumer.failed == {"d-1"}
    assert consumer.failed_blocks == set(blocks)
    assert consumer.counts() == {"num_failed_transfers": 1, "num_recomputed_requests": 1, **counts}
    assert not any(tensor.any() for tensors in consumer.pages for tensor in tensors.values())


def test_a_host_that_the_settings_do_not_allow_is_not_dialled(producer, consumer, caplog):
    """By default none but this one: whoever names a producer could name one of his own."""
    references, _ = producer.export("p-1", (1, 2))
    elsewhere = replace(producer.address, host="192.0.2.1")
    consumer.worker.carry(Work(pulls=(pull(elsewhere, "d-1", references, (1, 2)),)))
    refused(consumer)
    assert "peer_unreachable" in caplog.text
    assert "`192.0.2.1` is not among `allowed_hosts`" in caplog.text


def test_another_prompt_is_refused(producer, consumer, caplog):
    references, _ = producer.export("p-1", (1, 2))
    load(consumer, producer, "d-1", references, (1, 2), digest=b"e" * 48)
    refused(consumer, num_refused_references=1)
    assert "reference_digest" in caplog.text


def test_an_edited_reference_is_refused(producer, consumer):
    references, _ = producer.export("p-1", (1, 2))
    edited = json.dumps(json.loads(references[0][0]) | {"num_tokens": 31})
    load(consumer, producer, "d-1", ((edited,),), (1, 2))
    refused(consumer, num_refused_references=1)


def test_a_used_reference_is_refused(producer, consumer):
    references, _ = producer.export("p-1", (1, 2))
    load(consumer, producer, "d-0", references, ())
    producer.until_sent("p-1")
    consumer.counts()
    load(consumer, producer, "d-1", references, (1, 2))
    refused(consumer, num_refused_references=1)


def test_an_expired_reference_is_refused(producer, consumer):
    references, _ = producer.export("p-1", (1, 2), lease_s=0.05)
    producer.until_sent("p-1")
    load(consumer, producer, "d-1", references, (1, 2))
    refused(consumer, num_refused_references=1, num_notifications_after_expiry=1)


def test_blocks_that_are_none_fail_the_load(producer, consumer):
    references, _ = producer.export("p-1", (1, 2))
    load(consumer, producer, "d-1", references, (1, BLOCKS))
    refused(consumer, (1, BLOCKS))


def test_a_range_beyond_the_export_fails_the_load(producer, consumer):
    references, _ = producer.export("p-1", (1, 2))
    load(consumer, producer, "d-1", references, (1, 2), first_blocks=(1,))
    refused(consumer)


@pytest.mark.parametrize(
    "references",
    [(), (("{}",),), (("not JSON",),), ((),), (("a", "b"),), (("a",), ("b",))],
    ids=str,
)
def test_what_is_no_reference_fails_the_load(producer, consumer, references):
    load(consumer, producer, "d-1", references, (1, 2))
    refused(consumer)


def test_the_others_of_a_load_are_cancelled_when_one_fails(monkeypatch):
    transfers, cancel = [], Load.cancel
    monkeypatch.setattr(Load, "cancel", lambda load: (transfers.extend(load.transfers.values()), cancel(load)))
    with producing(groups=2) as producer, consuming(groups=2) as consumer:
        # The second group's export never comes, the first one's is expired.
        gone, _ = producer.export("p-1", (1, 2), (3,), lease_s=0.05)
        producer.until_sent("p-1")
        pending = producer.mint(((1, 2), (3,)))
        load(consumer, producer, "d-1", ((gone[0][0], pending[0][1]),), (1, 2), (3,))
        consumer.until_received("d-1")
        assert consumer.failed == {"d-1"}
        # Else it would wait for its export as long as an early claim may, and then not be known.
        kinds = {group: type(transfer.error) for group, transfer in transfers}
        assert kinds == {0: ReferenceExpiredError, 1: TransferCancelledError}
        assert consumer.worker._engine.stats["live_transfers"] == 0


def test_a_load_ends_by_its_deadline(producer):
    with consuming(transfer_timeout=0.3) as consumer:
        load(consumer, producer, "d-1", producer.mint(((3, 4),)), (1, 2))
        consumer.until_received("d-1")
        assert consumer.failed == {"d-1"}
        assert consumer.counts()["num_failed_transfers"] == 1


def test_a_cancelled_load_is_reported_and_given_back(producer, consumer):
    references = producer.mint(((3, 4),))
    load(consumer, producer, "d-1", references, (1, 2))
    until(lambda: consumer.worker._engine.stats["live_transfers"])
    consumer.worker.carry(Work(cancels=("d-1", "d-unknown")))
    consumer.until_received("d-1")
    assert consumer.failed == {"d-1"}
    producer.worker.carry(Work(exports=(ExportOrder("p-1", references, ((3, 4),), 60.0),)))
    producer.until_sent("p-1")
    assert consumer.counts() == {"num_cancelled": 1, "num_declined": 1}


def test_a_load_that_is_cancelled_before_it_began_is_given_back(producer, consumer):
    references, _ = producer.export("p-1", (3, 4))
    order = pull(producer.address, "d-1", references, (1, 2))
    consumer.worker.carry(Work(pulls=(order,)))
    consumer.worker.carry(Work(cancels=("d-1",)))
    consumer.until_received("d-1")
    producer.until_sent("p-1")


def test_an_ended_load_can_not_be_cancelled(producer, consumer):
    references, _ = producer.export("p-1", (3, 4))
    load(consumer, producer, "d-1", references, (1, 2))
    consumer.until_received("d-1")
    consumer.worker.carry(Work(cancels=("d-1",)))
    assert consumer.look() == Results()
    assert not consumer.failed


def test_an_id_that_is_loaded_again_has_the_newer_fate(producer, consumer):
    older = producer.mint(((3, 4),))
    load(consumer, producer, "d-1", older, (1, 2))
    until(lambda: consumer.worker._engine.stats["live_transfers"])
    references, value = producer.export("p-2", (5, 6))
    load(consumer, producer, "d-1", references, (7, 8))
    consumer.until_received("d-1")
    assert not consumer.failed
    assert consumer.holds(0, (7, 8), value)
    assert consumer.look() == Results()
    assert consumer.worker._engine.stats["live_transfers"] == 0


def test_a_refusal_replaces_a_load(producer, consumer):
    load(consumer, producer, "d-1", producer.mint(((3, 4),)), (1, 2))
    consumer.worker.carry(Work(refusals=(Refusal("d-1", "reference_forged", "it contradicts itself", (9,)),)))
    consumer.until_received("d-1")
    assert consumer.failed == {"d-1"}
    assert consumer.look() == Results()


def test_work_for_another_number_of_ranks_is_refused(consumer):
    with producing(ranks={"tp_size": 1}) as producer:
        references, _ = producer.export("p-1", (1, 2))
        load(consumer, producer, "d-1", (references[0], references[0]), (1, 2))
        refused(consumer)


def test_a_bug_in_an_order_costs_that_request_only(producer, consumer, caplog):
    references, value = producer.export("p-1", (5, 6))
    broken = PullOrder("d-1", producer.address, references, None, ((1,),), ("x",), 3)
    good = pull(producer.address, "d-2", references, (1, 2))
    consumer.worker.carry(Work(pulls=(None, broken, good), declines=(None,)))
    consumer.until_received("d-1", "d-2")
    assert consumer.failed == {"d-1"}
    assert consumer.holds(0, (1, 2), value)
    producer.worker.carry(Work(exports=(ExportOrder("p-9", references, 3, None),)))
    producer.until_sent("p-9")


def test_close_is_bounded_ends_everything_and_may_come_twice():
    with producing() as producer, consuming() as consumer:
        producer.export("p-1", (1, 2))
        load(consumer, producer, "d-1", producer.mint(((3, 4),)), (1, 2))
        until(lambda: consumer.worker._engine.stats["live_transfers"])
        for side in (consumer, producer):
            side.worker.close()
            side.worker.close()
            assert side.worker._engine.closed
            side.worker.carry(Work(refusals=(Refusal("d-2", "a", "b"),)))
            side.worker.results()


def test_work_in_another_order_is_no_matter(producer, consumer):
    """A step that cancels and orders at once: a reused id is the newer request's."""
    references, value = producer.export("p-1", (5, 6))
    consumer.worker.carry(
        Work(cancels=("d-1",), unwatches=("d-1",), pulls=(pull(producer.address, "d-1", references, (1, 2)),))
    )
    consumer.until_received("d-1")
    assert not consumer.failed
    assert consumer.holds(0, (1, 2), value)


def test_settings_reach_the_engine(producer):
    with consuming(transports=("tcp",), threads=1) as consumer:
        references, value = producer.export("p-1", (5, 6))
        load(consumer, producer, "d-1", references, (1, 2))
        consumer.until_received("d-1")
        assert consumer.worker.stats.snapshot_and_reset()["paths"] == {"tcp": 1}
        assert consumer.holds(0, (1, 2), value)


def test_what_is_required_is_had_or_refused(producer):
    with consuming(require="rdma") as consumer:
        references, _ = producer.export("p-1", (5, 6))
        load(consumer, producer, "d-1", references, (1, 2))
        refused(consumer)


def test_a_rank_says_who_it_is(producer):
    info = producer.worker.info
    assert (info.tp_rank, info.pp_rank) == (0, 0)
    assert info.address == producer.worker._engine.address
    assert info.incarnation == producer.worker._engine.incarnation
    assert info.groups[0]["block_tokens"] == 16
    assert json.loads(json.dumps(info.groups)) == list(info.groups)


def test_ranks_beside_each_other_take_neighbouring_ports():
    with consuming() as spare:
        free = int(spare.worker.info.address.rpartition(":")[2])
    ranks = {"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2}
    with consuming(engine_port=free - 3, ranks=ranks) as side:
        assert side.worker.info.address == f"127.0.0.1:{free}"


def test_a_start_that_can_not_be_leaves_nothing_behind():
    with pytest.raises(ConfigError, match="not encrypted"):
        WorkerSide("w", Settings(host="0.0.0.0"), [])
    tensors = {"a": np.zeros((4, 2, 16, 64), np.float32)}
    with pytest.raises(ValueError, match="block"):
        WorkerSide("w", Settings(), [GroupCache(tensors, "BHNC", 17)])


def test_nothing_is_logged_as_a_warning_when_all_is_well(producer, consumer, caplog):
    with caplog.at_level(logging.WARNING):
        references, _ = producer.export("p-1", (5, 6))
        load(consumer, producer, "d-1", references, (1, 2))
        consumer.until_received("d-1")
        producer.until_sent("p-1")
    assert not caplog.records
    assert DIGEST  # the digest of both ends


def test_every_rank_has_its_own_share_and_reports_it_once():
    sizes = {"tp_size": 2, "pp_size": 2}
    places = [{"pp_rank": pp, "tp_rank": tp, **sizes} for pp in range(2) for tp in range(2)]
    with ExitStack() as stack:
        producers = [stack.enter_context(consuming(f"p{n}", ranks=place)) for n, place in enumerate(places)]
        consumers = [stack.enter_context(consuming(f"d{n}", ranks=place)) for n, place in enumerate(places)]
        served = Directory("p", [side.worker.info for side in producers])
        stack.callback(served.close)
        issuers = [Issuer.from_bytes(side.worker.info.issuers[0]) for side in producers]
        references = tuple((issuer.issue(num_blocks=2, num_tokens=32, digest=DIGEST).to_json(),) for issuer in issuers)
        for rank, side in enumerate(producers):
            side.fill(0, (5, 6), 10_000 * (1 + rank))
            side.worker.carry(Work(exports=(ExportOrder("p-1", references, ((5, 6),), 60.0),)))
        order = pull(ProducerAddress("p", "127.0.0.1", served.port), "d-1", references, (1, 2))
        for side in consumers:
            side.worker.carry(Work(pulls=(order,)))
        for rank, (producing_rank, side) in enumerate(zip(producers, consumers, strict=True)):
            side.until_received("d-1")
            producing_rank.until_sent("p-1")
            assert not side.failed
            assert side.holds(0, (1, 2), 10_000 * (1 + rank))
            assert side.look() == producing_rank.look() == Results()


def test_a_bug_in_one_part_costs_no_other(producer, consumer, monkeypatch, caplog):
    references, value = producer.export("p-1", (5, 6))
    worker = consumer.worker
    monkeypatch.setattr(worker._leases, "unwatch", lambda request_id: 1 / 0)
    monkeypatch.setattr(worker._exports, "collect", lambda results: 1 / 0)
    worker.carry(
        Work(
            unwatches=("d-0",),
            cancels=("d-0", None),
            pulls=(pull(producer.address, "d-1", references, (1, 2)),),
        )
    )
    consumer.until_received("d-1")
    assert consumer.holds(0, (1, 2), value)
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.setattr(worker._pulls, "close", lambda timeout_s: 1 / 0)
    monkeypatch.setattr(worker._leases, "close", lambda timeout_s: 1 / 0)
    worker.close()
    assert worker._engine.closed


def test_a_host_that_is_another_machines_is_said_so():
    with pytest.raises(ConfigError, match="rank `1` can't listen") as raised:
        WorkerSide("w", Settings(host="192.0.2.1", insecure=True), [], tp_rank=1, tp_size=2)
    assert "not supported yet" in raised.value.hint


def test_what_is_the_engines_to_know_reaches_it(monkeypatch):
    told = []

    def engine(name, **how):
        told.append(how)
        return Engine(name, **how)

    monkeypatch.setattr("pdkv.connectors.core.worker.Engine", engine)
    staging = {"staging_bytes": 8 << 20, "staging_patience": 7.5}
    given = {"threads": 3, "transports": ("tcp",), "verify_copies": True, **staging}
    for settings, claim_s in (({}, 120), ({**given, "transfer_timeout": 600.0}, 600)):
        with consuming(**settings):
            for name in ("threads", "transports", "staging_bytes"):
                assert told[-1][name] == settings.get(name)
            assert told[-1]["staging_patience_s"] == settings.get("staging_patience")
            assert told[-1]["verify_copies"] == settings.get("verify_copies", False)
            assert told[-1]["max_claim_s"] == claim_s  # or a load that may take longer would be ended by its producer
