"""Caches on a device that works behind its LLM engine's back: what is pinned is written, what is filled is free.

The device is made up, and does what it was given when it is told to.
"""

from __future__ import annotations

import pytest

from connectors.sides import consuming, producing, pull, until
from pdkv.connectors.core import load
from pdkv.connectors.core.device import KEPT, Steps
from pdkv.connectors.core.work import ExportOrder, Work
from pdkv.engine import Reference


class Mark:
    def __init__(self, place, device):
        self.place, self.device = place, device

    def query(self):
        return self.device.done >= self.place


class Device:
    """Everything that was given is counted, and done up to a place."""

    stream = "the stream"

    def __init__(self):
        self.given = self.done = 0

    def mark(self):
        return Mark(self.given, self)


@pytest.fixture
def device():
    return Device()


# Steps


def test_a_step_is_over_when_the_device_has_come_to_the_beginning_of_a_later_one(device):
    steps = Steps(device)
    steps.begin(1)
    assert not steps.over(1)  # nobody knows where it ends
    device.given = 10  # step 1
    steps.begin(2)
    device.given = 20  # step 2
    steps.begin(3)
    assert not steps.over(1)
    device.done = 10
    assert steps.over(1)
    assert not steps.over(2)
    device.done = 20
    assert steps.over(2)
    assert not steps.over(3)


def test_a_step_whose_mark_is_forgotten_is_over_with_a_later_one(device):
    steps = Steps(device)
    for number in range(1, KEPT + 10):
        steps.begin(number)
        device.given += 1
    assert not steps.over(1)
    device.done = 8
    assert not steps.over(1)
    device.done = 9
    assert steps.over(1)


# A producer


def export(producer, step, request_id="r", blocks=(3, 4)):
    references = producer.mint([blocks])
    producer.worker.carry(Work(exports=(ExportOrder(request_id, references, (blocks,), 3600.0, step),)))
    return references


def test_blocks_are_pinned_when_the_device_has_written_them(device):
    """And a claim that comes before waits, instead of reading what is not there yet."""
    with producing(device=device) as producer, consuming() as consumer:
        producer.worker.begin_step(1)
        device.given = 10
        producer.worker.begin_step(2)
        references = export(producer, step=1)
        consumer.worker.carry(Work(pulls=(pull(producer.address, "d", references, (1, 2)),)))
        until(lambda: producer.worker._engine.peers, "the consumer")
        for _ in range(20):
            producer.look()
            consumer.look()
        assert consumer.received == producer.sent == []
        producer.fill(0, (3, 4), 7)  # only now it does what it was given
        device.done = 10
        producer.look()
        consumer.until_received("d")
        producer.until_sent("r")
        assert consumer.holds(0, (1, 2), 7)
        assert not consumer.failed


@pytest.mark.parametrize("step", [0, 1])
def test_what_is_written_already_is_pinned_at_once(device, step):
    with producing(device=device) as producer, consuming() as consumer:
        producer.worker.begin_step(1)
        producer.worker.begin_step(2)
        producer.fill(0, (3, 4), 7)
        references = export(producer, step=step)
        assert not producer.worker._exports._held
        consumer.worker.carry(Work(pulls=(pull(producer.address, "d", references, (1, 2)),)))
        consumer.until_received("d")
        assert consumer.holds(0, (1, 2), 7)


def test_what_waits_for_the_device_and_is_declined_by_this_engine_is_never_pinned(device):
    with producing(device=device) as producer:
        producer.worker.begin_step(1)
        device.given = 10
        producer.worker.begin_step(2)
        references = export(producer, step=1)
        other = export(producer, step=1, request_id="other", blocks=(5,))
        producer.worker._exports.release(Reference.from_json(references[0][0]))
        producer.until_sent("r")
        device.done = 10
        producer.look()
        assert producer.sent == ["r"]
        producer.worker._exports.release(Reference.from_json(other[0][0]))
        producer.until_sent("other")


def test_a_producer_that_ends_pins_nothing_any_more(device):
    with producing(device=device) as producer:
        producer.worker.begin_step(1)
        device.given = 10
        producer.worker.begin_step(2)
        export(producer, step=1)
        producer.worker.close()
        device.done = 10
        producer.worker.begin_step(3)
        producer.look()
        assert producer.sent == []


# A consumer


def test_a_pull_is_ordered_behind_what_its_device_was_given(device):
    """The stream goes with the pull, which waits for what is on it."""
    seen = []

    class Cache:
        fingerprint = "f"

        def pull(self, reference, into, **named):
            seen.append(named.get("stream"))
            return type("Transfer", (), {"id": len(seen)})()

    class Given:
        fingerprint, num_blocks = "f", 2

    for where in (None, device):
        kit = load.Kit(None, [Cache()], [0], 1, None, load.Settings(), None, where)
        loading = load.Load(pull(None, "d", ((),), (1, 2)), 1e12)
        loading.references = (Given(),)
        loading.post(None, kit)
    assert seen == [None, "the stream"]
