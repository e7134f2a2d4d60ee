"""Reaching producers in the background: nobody waits for somebody else's dead host, and nothing is left over."""

from __future__ import annotations

import threading
import time

import pytest

from connectors.sides import until
from pdkv.connectors.core import dial
from pdkv.connectors.core.dial import Dialler, Job
from pdkv.connectors.core.work import ProducerAddress
from pdkv.errors import ClosedError, InternalError, PeerUnreachableError, TransferTimeoutError


class FakePeer:
    incarnation = "life"
    alive = True


class FakeLine:
    """A line that is reached when its test says so."""

    def __init__(self, producer):
        self.producer = producer
        self.peer = None
        self.used_at = time.monotonic()
        self.gate = threading.Event()
        self.dead = producer.host.startswith("dead")
        self.proven = False
        self.reached = self.closed = 0
        if not self.dead:
            self.gate.set()

    def ready(self, incarnation):
        return self.peer

    def reach(self, incarnation, deadline):
        self.reached += 1
        self.used_at = time.monotonic()
        self.gate.wait(60)
        if self.dead:
            raise PeerUnreachableError("nobody is there")
        self.peer, self.proven = self.peer or FakePeer(), True
        return self.peer

    def close(self):
        self.closed += 1
        self.peer = None


class World:
    def __init__(self, idle_s=300.0):
        self.lines = {}
        self.ran, self.failed = [], []
        self.dialler = Dialler(self.line, idle_s)
        self._others = set(threading.enumerate())  # a dialler of an earlier test may still have one on its way out

    def line(self, producer):
        line = self.lines[producer] = FakeLine(producer)
        return line

    def submit(self, host, name="job", *, deadline_s=60.0, urgent=True, run=None, engine_id="e"):
        producer = ProducerAddress(engine_id, host, 1)
        job = Job(
            "life",
            time.monotonic() + deadline_s,
            run or (lambda peer: self.ran.append(name)),
            lambda error: self.failed.append((name, error)),
        )
        self.dialler.submit(producer, job, urgent=urgent)
        return producer

    def threads(self):
        threads = set(threading.enumerate()) - self._others
        return [thread for thread in threads if thread.name == "pdkv-dial"]


@pytest.fixture
def world():
    world = World()
    yield world
    for line in world.lines.values():
        line.gate.set()
    world.dialler.close(30)
    until(lambda: not world.threads())


def test_a_job_gets_the_connection(world):
    producer = world.submit("good")
    until(lambda: world.ran == ["job"])
    assert world.dialler.ready(producer, "life") is world.lines[producer].peer
    assert world.dialler.ready(ProducerAddress("e", "other", 1), "life") is None


def test_a_job_gets_the_reason_why_there_is_none(world):
    producer = world.submit("dead")
    until(lambda: world.lines)
    world.lines[producer].gate.set()
    until(lambda: world.failed)
    assert isinstance(world.failed[0][1], PeerUnreachableError)


def test_dead_hosts_delay_nobody(world):
    for number in range(dial.MAX_UNPROVEN - 1):
        world.submit(f"dead-{number}")
    for number in range(20):
        world.submit(f"good-{number}")
    until(lambda: len(world.ran) == 20)
    assert not world.failed


def test_a_producer_that_was_reached_never_waits_for_those_that_were_not(world):
    producers = [world.submit(f"good-{number}") for number in range(10)]
    until(lambda: len(world.ran) == 10)
    assert all(world.dialler.knows(producer) for producer in producers)
    for number in range(500):
        world.submit(f"dead-{number}")
    for number in range(10):
        world.submit(f"good-{number}", urgent=number % 2 == 0)
    until(lambda: len(world.ran) == 20)
    assert not world.failed
    assert not world.dialler.knows(ProducerAddress("e", "dead-0", 1))


def test_one_host_can_not_have_all_that_is_left_to_strangers(world):
    for number in range(100):
        world.submit("dead", engine_id=f"e-{number}")
    world.submit("good")
    until(lambda: world.ran == ["job"])
    assert sum(line.reached for line in world.lines.values() if line.dead) == dial.MAX_UNPROVEN_OF_HOST
    for line in world.lines.values():
        line.gate.set()
    until(lambda: len(world.failed) == 100)
    until(lambda: not world.dialler._running_unproven)
    assert not any((world.dialler._held_back, world.dialler._of_host))


def test_threads_are_bounded_and_what_waits_is_run_in_time(world):
    number_of_hosts = 3 * dial.MAX_UNPROVEN
    for number in range(dial.MAX_UNPROVEN):
        world.submit(f"dead-{number}", f"job-{number}")
    until(lambda: sum(line.reached for line in world.lines.values()) == dial.MAX_UNPROVEN)
    for number in range(dial.MAX_UNPROVEN, number_of_hosts):
        world.submit(f"dead-{number}", f"job-{number}", deadline_s=0.0)
    assert len(world.threads()) == dial.MAX_UNPROVEN
    for line in world.lines.values():
        line.gate.set()
    until(lambda: len(world.failed) == number_of_hosts)
    # Those that found no thread in time did not dial at all.
    assert sum(line.reached for line in world.lines.values()) == dial.MAX_UNPROVEN
    late = sum(isinstance(error, TransferTimeoutError) for _, error in world.failed)
    assert late == number_of_hosts - dial.MAX_UNPROVEN


def test_one_producer_is_one_thread(world):
    for number in range(500):
        world.submit("dead", f"job-{number}")
    until(lambda: world.threads())
    assert len(world.threads()) == 1
    next(iter(world.lines.values())).gate.set()
    until(lambda: len(world.failed) == 500)
    assert [name for name, _ in world.failed] == [f"job-{number}" for number in range(500)]
    assert len(world.threads()) == 1
    assert len(world.lines) == 1


def test_requests_go_before_leases(world):
    producer = world.submit("slow", "first", run=lambda peer: gate.wait(60))
    gate = threading.Event()
    until(lambda: world.lines and world.lines[producer].reached)
    for number in range(3):
        world.submit("slow", f"lease-{number}", urgent=False)
        world.submit("slow", f"request-{number}")
    gate.set()
    until(lambda: len(world.ran) == 6)
    assert world.ran == ["request-0", "request-1", "request-2", "lease-0", "lease-1", "lease-2"]


def test_a_bug_in_a_job_fails_it_and_no_other(world, caplog):
    world.submit("good", "bad", run=lambda peer: 1 / 0)
    world.submit("good", "next")
    until(lambda: world.ran == ["next"])
    assert [(name, type(error)) for name, error in world.failed] == [("bad", InternalError)]
    assert "ZeroDivisionError" in caplog.text


def test_a_bug_in_a_line_fails_its_jobs_and_no_other(world, monkeypatch, caplog):
    monkeypatch.setattr(FakeLine, "reach", lambda *args: [][1])
    for _ in range(3):
        world.submit("odd")
    until(lambda: len(world.failed) == 3)
    assert {type(error) for _, error in world.failed} == {InternalError}
    assert "IndexError" in caplog.text
    monkeypatch.undo()
    world.submit("odd", "next")
    until(lambda: world.ran == ["next"])


def test_a_job_that_can_not_even_be_failed_costs_no_other(world, caplog):
    producer = ProducerAddress("e", "good", 1)
    world.dialler.submit(producer, Job("life", 0.0, lambda peer: None, lambda error: 1 / 0), urgent=True)
    world.submit("good", "next")
    until(lambda: world.ran == ["next"])
    assert "ZeroDivisionError" in caplog.text


def test_close_fails_what_waits(world):
    world.submit("dead", "running")
    until(lambda: any(line.reached for line in world.lines.values()))
    world.submit("dead", "waiting")
    closing = threading.Thread(target=lambda: world.dialler.close(30))
    closing.start()
    until(lambda: world.failed)
    assert [(name, type(error)) for name, error in world.failed] == [("waiting", ClosedError)]
    next(iter(world.lines.values())).gate.set()
    closing.join()
    world.submit("good", "late")
    assert [(name, type(error)) for name, error in world.failed[1:]] == [
        ("running", PeerUnreachableError),
        ("late", ClosedError),
    ]
    assert not world.ran


def test_close_is_bounded(world):
    world.submit("dead")
    until(lambda: any(line.reached for line in world.lines.values()))
    started = time.monotonic()
    world.dialler.close(0.1)
    assert time.monotonic() - started < 30  # the line is held for 60


def test_what_nobody_uses_is_let_go(monkeypatch):
    monkeypatch.setattr(dial, "_LINGER_S", 0.05)
    world = World(idle_s=0.3)
    dead, good = world.submit("dead"), world.submit("good")
    until(lambda: world.ran and dead in world.lines)
    world.lines[dead].gate.set()
    until(lambda: world.lines[good].closed and world.lines[dead].closed)
    until(lambda: not world.threads())
    assert not world.dialler._queues
    # And it is there again when somebody comes.
    world.submit("good")
    until(lambda: len(world.ran) == 2)
    world.dialler.close(30)


@pytest.fixture
def resting(monkeypatch):
    """A dialler with a producer and two threads, of which the test is one; the other counts, and does nothing."""
    monkeypatch.setattr(dial, "_LINGER_S", 0.05)
    world = World()
    producer = world.submit("good")
    until(lambda: world.ran and not world.dialler._queues[producer].busy)
    with world.dialler._changed:
        world.dialler._threads |= {threading.Thread(), threading.current_thread()}
    yield world, world.dialler._queues[producer]
    world.dialler._threads &= set(world.threads())
    world.dialler.close(30)


def test_a_thread_that_goes_is_not_counted_on_by_the_next(resting):
    world, _ = resting
    assert world.dialler._next() is None
    assert threading.current_thread() not in world.dialler._threads


def test_a_call_that_a_resting_thread_missed_is_not_lost(resting, monkeypatch):
    """The wait of a condition may end by its time in the moment in which it is notified."""
    world, queue = resting
    until(lambda: len(world.threads()) == 0)
    job = Job("life", time.monotonic() + 60, lambda peer: None, lambda error: None)

    def come(timeout):
        queue.soon.append(job)
        world.dialler._unproven.append(queue)
        return False  # as if its time were over

    monkeypatch.setattr(world.dialler._changed, "wait", come)
    assert world.dialler._next() == (queue, job)


def test_what_somebody_uses_stays(monkeypatch):
    monkeypatch.setattr(dial, "_LINGER_S", 0.02)
    world = World(idle_s=30.0)
    good = world.submit("good")
    until(lambda: world.ran)
    time.sleep(0.3)
    assert not world.lines[good].closed
    assert len(world.threads()) == 1
    world.dialler.close(30)
