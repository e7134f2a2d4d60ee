"""Loads step by step, over transfers that end and fall quiet when the test says so."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from connectors.sides import DIGEST, PATIENCE_S, producing
from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.line import Place
from pdkv.connectors.core.load import Kit
from pdkv.connectors.core.pulls import Pulls
from pdkv.connectors.core.stats import Stats
from pdkv.connectors.core.work import ProducerAddress, PullOrder, Results
from pdkv.errors import PeerLostError, ReferenceReleasedError, ReferenceUnknownError, TransferTimeoutError

PRODUCER = ProducerAddress("p", "127.0.0.1", 1)


class FakeTransfer:
    def __init__(self, number, into, options):
        self.id, self.into, self.options = number, into, options
        self.error, self.quiesced, self.cancelled = None, False, False
        self.destination = "pending"
        self.path = SimpleNamespace(transport="fake")
        self.stats = SimpleNamespace(plan_us=1, post_us=2, wire_us=3, handover_us=4, bytes=5, runs=6)

    def cancel(self):
        self.cancelled = True

    def wait_quiesced(self, timeout_s):
        return self.quiesced


class Fakes:
    """The engine, a cache for each group and the connection, all in one."""

    incarnation = "not the producer's"
    alive = True

    def __init__(self, fingerprints):
        self.completed, self.transfers = [], []
        self.numbers = itertools.count(1)
        self.caches = [SimpleNamespace(fingerprint=fingerprint, pull=self.pull) for fingerprint in fingerprints]
        self.failures = []
        self.declined, self.told = [], []
        self.jobs, self.connected = [], True
        self.unknown, self.asked = set(), []
        self.open = 0

    def completions(self):
        self.open += 1
        return SimpleNamespace(take=self.take, close=self.close)

    def close(self):
        self.open -= 1

    def take(self):
        completed, self.completed = self.completed, []
        return completed

    def pull(self, reference, into, **options):
        if self.failures and (failure := self.failures.pop(0)):
            raise failure
        self.transfers.append(FakeTransfer(next(self.numbers), into, options))
        return self.transfers[-1]

    def end(self, transfer, error=None, *, quiet=True):
        transfer.error, transfer.quiesced = error, quiet
        self.completed.append(transfer.id)

    def await_cache(self, reference, *, timeout_s=0.0):
        """What is unknown is known once somebody has waited for it, and the test has looked on."""
        if timeout_s and reference.num_blocks in self.unknown:
            self.asked.append(timeout_s)
            self.unknown.discard(reference.num_blocks)
            self.meanwhile()
        return reference.num_blocks not in self.unknown

    # The dialler and the declines.
    def ready(self, producer, incarnation):
        return self if self.connected else None

    def submit(self, producer, job, *, urgent):
        assert urgent
        self.jobs.append(job)

    def decline(self, producer, references):
        self.declined += references

    def tell(self, peer, references):
        self.told += references


@pytest.fixture(scope="module")
def minted():
    with producing(groups=2) as producer:
        fingerprints = [str(group["fingerprint"]) for group in producer.worker.info.groups]
        yield fingerprints, producer.mint(((1, 2), (3,)))


@pytest.fixture
def world(minted):
    fakes = Fakes(minted[0])
    stats = Stats()
    place = Place(0, 1, 0, 1, ())
    kit = Kit(
        fakes, fakes.caches, range(len(fakes.caches)), len(fakes.caches), place, Settings(transfer_timeout=30.0), stats
    )
    fakes.over = []
    fakes.pulls = Pulls(kit, fakes, fakes, fakes.over.append)
    fakes.stats, fakes.references = stats, minted[1]
    yield fakes
    fakes.pulls.close(0.0)


def begin(world, request_id="d-1", into=((1, 2), (3,))):
    world.pulls.begin(PullOrder(request_id, PRODUCER, world.references, DIGEST, into, (0, 0), 32))


def ended(world):
    results = Results()
    world.pulls.collect(results)
    return results


OK = Results(received={"d-1"})
BAD = Results(received={"d-1"}, failed={"d-1"}, failed_blocks={1, 2, 3})


def test_it_has_ended_when_all_have(world):
    begin(world)
    first, second = world.transfers
    assert first.options["digest"] == DIGEST
    assert 0 < first.options["timeout_s"] <= 30.0
    world.end(second)
    assert ended(world) == Results()
    world.end(first)
    assert ended(world) == OK
    assert world.over == ["d-1"]
    assert ended(world) == Results()


def test_it_has_not_ended_while_memory_is_touched(world):
    begin(world)
    first, second = world.transfers
    world.end(first, TransferTimeoutError("late"), quiet=False)
    assert ended(world) == Results()
    assert second.cancelled
    world.end(second, TransferTimeoutError("late"))
    for _ in range(3):
        assert ended(world) == Results()
    first.quiesced = True
    assert ended(world) == BAD
    assert not world.declined  # somebody else may still come for it


def test_it_fails_if_the_last_one_does(world):
    begin(world)
    for transfer, error in zip(world.transfers, (None, PeerLostError("gone")), strict=True):
        world.end(transfer, error)
    assert ended(world) == BAD


def test_a_cancelled_one_gives_back_what_it_has_not_had(world):
    begin(world)
    first, second = world.transfers
    world.end(first)
    assert ended(world) == Results()
    world.pulls.cancel("d-1")
    assert second.cancelled
    world.end(second, TransferTimeoutError("whatever"))
    assert ended(world) == BAD
    assert [reference.num_blocks for reference in world.declined] == [1]
    assert "num_recomputed_requests" in (counts := world.stats.snapshot_and_reset())
    assert counts["num_recomputed_requests"] == 0
    assert counts["num_cancelled"] == 1


def test_one_that_can_not_be_posted_ends_with_those_that_were(world):
    world.failures = [None, PeerLostError("gone")]
    begin(world)
    (first,) = world.transfers
    assert first.cancelled
    assert ended(world) == Results()
    world.end(first, TransferTimeoutError("cancelled"), quiet=False)
    assert ended(world) == Results()
    first.quiesced = True
    assert ended(world) == BAD


def test_a_connection_that_was_just_lost_is_asked_for_again_once(world):
    world.failures = [PeerLostError("gone")]
    begin(world)
    assert ended(world) == Results()
    (job,) = world.jobs
    job.run(world)
    assert len(world.transfers) == 2
    for transfer in world.transfers:
        world.end(transfer)
    assert ended(world) == OK
    world.connected = False
    begin(world)
    world.failures = [PeerLostError("gone")]
    world.jobs.pop().run(world)
    assert ended(world) == BAD


def test_a_cache_that_is_not_known_yet_is_asked_for_by_the_dialler_and_holds_nobody_up(world):
    world.unknown = {1, 2}  # of both groups, by the number of their blocks
    looked = []

    def meanwhile():
        llm_engine = threading.Thread(target=lambda: looked.append(ended(world)), daemon=True)
        llm_engine.start()
        llm_engine.join(PATIENCE_S)

    world.meanwhile = meanwhile
    begin(world)
    assert not world.transfers
    assert not world.asked
    world.jobs.pop().run(world)
    assert looked == [Results(), Results()]
    assert all(0 < timeout_s <= 5.0 for timeout_s in world.asked)
    for transfer in world.transfers:
        world.end(transfer)
    assert ended(world) == OK
    begin(world, "d-2")
    assert len(world.transfers) == 4
    assert not world.jobs


def test_one_that_was_cancelled_while_a_cache_was_asked_for_posts_nothing(world):
    world.unknown = {2}
    world.meanwhile = lambda: world.pulls.cancel("d-1")
    begin(world)
    world.jobs.pop().run(world)
    assert not world.transfers
    assert ended(world) == BAD


def test_a_cache_that_the_producer_has_not_fails_the_load(world, monkeypatch):
    def answer(reference, *, timeout_s=0.0):
        if timeout_s:
            raise ReferenceUnknownError("the peer has no such cache")
        return False

    monkeypatch.setattr(world, "await_cache", answer)
    begin(world)
    assert ended(world) == Results()
    world.jobs.pop().run(world)
    assert not world.transfers
    assert ended(world) == BAD


def test_a_connection_that_is_found_lost_is_made_again(world, monkeypatch):
    def lost(reference, *, timeout_s=0.0):
        raise PeerLostError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(world, "await_cache", lost)
        begin(world)
    assert not world.transfers
    world.jobs.pop().run(world)
    assert len(world.transfers) == 2


def test_what_came_too_late_posts_nothing(world):
    world.connected = False
    begin(world)
    world.pulls.cancel("d-1")
    assert ended(world) == BAD
    assert len(world.declined) == 2
    world.jobs.pop().run(world)
    assert not world.transfers
    assert ended(world) == Results()


def test_what_never_gets_a_connection_ends_by_its_deadline(world, monkeypatch):
    """As when all threads are busy with other dead hosts, and the job is never begun."""
    world.connected = False
    begin(world)
    assert ended(world) == Results()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 31.0)
    assert ended(world) == BAD
    world.jobs.pop().run(world)
    assert not world.transfers


def test_the_newest_fate_counts_whichever_ends_first(world):
    begin(world)
    begin(world)
    old, new = world.transfers[:2], world.transfers[2:]
    assert all(transfer.cancelled for transfer in old)
    for transfer in new:
        world.end(transfer)
    assert ended(world) == Results()
    for transfer in old:
        world.end(transfer, TransferTimeoutError("cancelled"))
    assert ended(world) == OK
    assert world.over == ["d-1"]
    begin(world)
    begin(world)
    old, new = world.transfers[4:6], world.transfers[6:]
    for transfer in old:
        world.end(transfer, TransferTimeoutError("cancelled"))
    assert ended(world) == Results()
    for transfer in new:
        world.end(transfer)
    assert ended(world) == OK


def test_a_read_that_was_refused_after_bytes_moved_is_counted(world):
    begin(world, into=((1, 2), ()))
    (transfer,) = world.transfers
    transfer.destination = "invalid"
    world.end(transfer, ReferenceReleasedError("released"))
    assert ended(world) == Results(received={"d-1"}, failed={"d-1"}, failed_blocks={1, 2})
    counts = world.stats.snapshot_and_reset()
    assert counts["num_fenced_reads"] == counts["num_refused_references"] == counts["num_failed_transfers"] == 1
    assert [reference.num_blocks for reference in world.told] == [1]


def test_an_unknown_completion_is_no_matter(world):
    begin(world)
    world.completed += [77, 78]
    assert ended(world) == Results()


def test_only_what_has_ended_is_looked_at(world):
    """With many in flight a look asks none of them anything."""

    class Untouchable(FakeTransfer):
        @property
        def quiesced(self):
            raise AssertionError("a running transfer was asked")

        @quiesced.setter
        def quiesced(self, value):
            pass

    for number in range(100):
        begin(world, f"d-{number}")
    for transfer in world.transfers:
        transfer.__class__ = Untouchable
    assert ended(world) == Results()
    for transfer in world.transfers:
        transfer.__class__ = FakeTransfer
        world.end(transfer)
    assert ended(world).received == {f"d-{number}" for number in range(100)}


def test_statistics_can_not_cost_a_load(world, monkeypatch, caplog):
    begin(world)
    monkeypatch.setattr(world.stats, "transfer", lambda **figures: 1 / 0)
    for transfer in world.transfers:
        world.end(transfer)
    assert ended(world) == OK
    assert "could not be counted" in caplog.text
    begin(world)
    monkeypatch.setattr(world.stats, "count", lambda *args: 1 / 0)
    for transfer in world.transfers[2:]:
        world.end(transfer, PeerLostError("gone"))
    assert ended(world) == BAD
