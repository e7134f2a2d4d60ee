"""The connection to a producer: what is compared before a byte moves, and what is tried again when."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest

from connectors.sides import consuming, producing, pull, until
from connectors.test_directory import framed, impostor
from pdkv.connectors.core import line as module
from pdkv.connectors.core.directory import Directory
from pdkv.connectors.core.line import Line
from pdkv.connectors.core.places import Places
from pdkv.connectors.core.work import ProducerAddress, Work
from pdkv.errors import (
    HandshakeError,
    LayoutError,
    PeerUnreachableError,
    ReferenceRestartedError,
    TransferTimeoutError,
)


def line_to(address, consumer, *, allowed=None, timeout_s=30.0, **place):
    worker = consumer.worker
    kit = worker._kit
    return Line(address, worker._engine, replace(kit.place, **place), Places(allowed), timeout_s)


def reach(line, incarnation, within_s=60.0):
    return line.reach(incarnation, time.monotonic() + within_s)


def test_it_is_made_once(producer, consumer):
    line = line_to(producer.address, consumer)
    incarnation = producer.worker.info.incarnation
    assert line.ready(incarnation) is None
    peer = reach(line, incarnation)
    producer.directory.close()  # it is not asked again
    assert reach(line, incarnation) is peer
    assert line.ready(incarnation) is peer
    line.close()
    assert line.ready(incarnation) is None
    assert not peer.alive


def test_another_llm_engine_there_is_named(producer, consumer):
    line = line_to(replace(producer.address, engine_id="q"), consumer)
    with pytest.raises(ReferenceRestartedError, match="engine_id `q`, but `p` answers"):
        reach(line, producer.worker.info.incarnation)


def test_another_life_of_the_engine_is_named(producer, consumer):
    line = line_to(producer.address, consumer)
    with pytest.raises(ReferenceRestartedError, match=f"but `{producer.worker.info.incarnation}` answers"):
        reach(line, "e" * 32)
    # That reference is stale, but the line is good, and at once.
    assert reach(line, producer.worker.info.incarnation).alive


def test_an_engine_that_the_directory_says_is_another_life_is_not_even_dialled(producer, consumer):
    served = Directory("p", [replace(producer.worker.info, address="127.0.0.1:1")])
    with pytest.raises(ReferenceRestartedError, match="incarnation"):
        reach(line_to(replace(producer.address, port=served.port), consumer), "e" * 32)
    served.close()


def test_a_restart_is_found_at_once(producer, consumer, monkeypatch):
    """However lately it was asked: what it told is worth nothing once its connection is gone."""
    monkeypatch.setattr(module, "_BELIEVED_S", (60.0, 60.0))
    line = line_to(producer.address, consumer)
    peer = reach(line, producer.worker.info.incarnation)
    producer.close()
    until(lambda: not peer.alive)
    with producing(port=producer.address.port) as restarted:
        assert reach(line, restarted.worker.info.incarnation).alive


def test_stale_references_do_not_ask_each_time(producer, consumer, monkeypatch):
    monkeypatch.setattr(module, "_BELIEVED_S", (60.0, 60.0))
    line = line_to(producer.address, consumer)
    reach(line, producer.worker.info.incarnation)
    producer.directory.close()
    for _ in range(3):
        with pytest.raises(ReferenceRestartedError, match=f"but `{producer.worker.info.incarnation}` answers"):
            reach(line, "e" * 32)
    assert line.ready(producer.worker.info.incarnation) is not None


def test_an_engine_at_the_told_address_that_is_another_life_is_refused(producer, consumer):
    lying = replace(producer.worker.info, incarnation="e" * 32)
    with_lie = Directory("p", [lying])
    line = line_to(replace(producer.address, port=with_lie.port), consumer)
    with pytest.raises(ReferenceRestartedError, match="incarnation"):
        reach(line, "e" * 32)
    assert consumer.worker._engine.peers == []
    with_lie.close()


@pytest.mark.parametrize(
    ("how", "fields"),
    [
        ({"model": "other"}, ["model of group 0 is `m#0` here and `other#0` there"]),
        ({"heads": 4}, ["heads of group 0 is `2` here and `4` there"]),
        ({"layers": 3}, ["layers of group 0 is `2` here and `3` there", "layer_names of group 0"]),
        ({"groups": 2}, ["groups is `1` here and `2` there"]),
        ({"model": "other", "heads": 4}, ["model of group 0", "heads of group 0"]),
    ],
    ids=str,
)
def test_caches_that_do_not_fit_are_refused_with_every_difference(consumer, how, fields):
    with producing(**how) as producer:
        line = line_to(producer.address, consumer)
        with pytest.raises(LayoutError) as raised:
            reach(line, producer.worker.info.incarnation)
        assert all(field in str(raised.value) for field in fields), raised.value
        assert "fingerprint" not in str(raised.value)
        assert consumer.worker._engine.peers == []


def test_another_number_of_blocks_fits(consumer):
    with producing(blocks=32) as producer:
        assert reach(line_to(producer.address, consumer), producer.worker.info.incarnation).alive


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_other_parallel_sizes_are_refused_with_both(consumer, producer, tp, pp):
    info = producer.worker.info
    ranks = [replace(info, tp_rank=tp_rank, pp_rank=pp_rank) for pp_rank in range(pp) for tp_rank in range(tp)]
    served = Directory("p", ranks)
    line = line_to(replace(producer.address, port=served.port), consumer)
    with pytest.raises(
        LayoutError, match=f"tp_size is `1` here and `{tp}` there, pp_size is `1` here and `{pp}` there"
    ):
        reach(line, info.incarnation)
    # A rank of as many is connected with its own like.
    fitting = line_to(line.producer, consumer, tp_size=tp, pp_size=pp, tp_rank=tp - 1, pp_rank=pp - 1)
    assert reach(fitting, info.incarnation).alive
    served.close()


def test_ranks_that_are_there_twice_are_refused(consumer, producer):
    info = producer.worker.info
    served = Directory("p", [info, info])
    with pytest.raises(HandshakeError, match="`2` ranks, of which `2` are rank `0`"):
        reach(line_to(replace(producer.address, port=served.port), consumer), info.incarnation)
    served.close()


def test_no_ranks_are_refused(consumer):
    with impostor(framed({"version": 1, "engine_id": "p", "ranks": []})) as port, pytest.raises(LayoutError):
        reach(line_to(ProducerAddress("p", "127.0.0.1", port), consumer), "e" * 32)


def test_a_host_that_is_not_allowed_is_not_dialled(consumer, producer, monkeypatch):
    asked = counted(monkeypatch)
    line = line_to(producer.address, consumer, allowed=["10.0.0.0/8"])
    with pytest.raises(PeerUnreachableError, match="allowed_hosts"):
        reach(line, producer.worker.info.incarnation)
    assert not asked


def test_a_directory_can_not_lead_elsewhere(consumer, producer):
    with socket.create_server(("127.0.0.2", 0)) as elsewhere:
        info = replace(producer.worker.info, address=f"127.0.0.2:{elsewhere.getsockname()[1]}")
        served = Directory("p", [info])
        line = line_to(replace(producer.address, port=served.port), consumer)
        with pytest.raises(PeerUnreachableError, match="is not the directory's"):
            reach(line, info.incarnation)
        elsewhere.settimeout(0.2)
        with pytest.raises(TimeoutError):
            elsewhere.accept()
        served.close()


def test_an_engine_that_is_gone_while_its_directory_answers_is_unreachable(consumer, producer):
    producer.worker.close()
    with pytest.raises(PeerUnreachableError):
        reach(line_to(producer.address, consumer), producer.worker.info.incarnation)


def counted(monkeypatch):
    calls = []
    real = module.fetch
    monkeypatch.setattr(module, "fetch", lambda *args: (calls.append(args), real(*args))[1])
    return calls


def test_a_storm_to_a_dead_host_asks_once(consumer, monkeypatch):
    monkeypatch.setattr(module, "_BELIEVED_S", (60.0, 60.0))
    calls = counted(monkeypatch)
    line = line_to(ProducerAddress("p", "127.0.0.1", 1), consumer)
    for _ in range(100):
        with pytest.raises(PeerUnreachableError):
            reach(line, "e" * 32)
    assert len(calls) == 1


def test_it_is_tried_again_after_a_while(consumer, producer, monkeypatch):
    monkeypatch.setattr(module, "_BELIEVED_S", (0.0, 0.0))
    producer.directory.close()
    line = line_to(producer.address, consumer)
    with pytest.raises(PeerUnreachableError):
        reach(line, producer.worker.info.incarnation)
    served = Directory("p", [producer.worker.info], port=producer.address.port)
    assert reach(line, producer.worker.info.incarnation).alive
    served.close()


def test_the_haste_of_one_request_is_not_held_against_the_producer(consumer, producer, monkeypatch):
    monkeypatch.setattr(module, "_BELIEVED_S", (60.0, 60.0))
    line = line_to(producer.address, consumer)
    with pytest.raises(TransferTimeoutError):
        reach(line, producer.worker.info.incarnation, within_s=-1.0)
    assert reach(line, producer.worker.info.incarnation).alive


def test_a_lost_connection_is_made_anew(consumer, producer):
    line = line_to(producer.address, consumer)
    first = reach(line, producer.worker.info.incarnation)
    first.close()
    assert reach(line, producer.worker.info.incarnation).alive


def test_a_directory_that_never_answers_ends_in_time(consumer):
    with impostor(b"", hang_up=False) as port:
        line = line_to(ProducerAddress("p", "127.0.0.1", port), consumer, timeout_s=0.2)
        started = time.monotonic()
        with pytest.raises(PeerUnreachableError, match="timed out"):
            reach(line, "e" * 32)
        assert time.monotonic() - started < 30


def test_an_engine_that_never_answers_ends_in_time(consumer, producer):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        info = replace(producer.worker.info, address=f"127.0.0.1:{silent.getsockname()[1]}")
        served = Directory("p", [info])
        line = line_to(replace(producer.address, port=served.port), consumer, timeout_s=0.3)
        with pytest.raises(PeerUnreachableError):
            reach(line, info.incarnation)
        served.close()


def test_loads_from_the_dead_do_not_delay_others(producer):
    with consuming(connect_timeout=600.0) as consumer:
        with impostor(b"", hang_up=False) as port:
            references, value = producer.export("p-1", (5, 6))
            dead = ProducerAddress("p", "127.0.0.1", port)
            before = set(threading.enumerate())
            consumer.worker.carry(Work(pulls=tuple(pull(dead, f"dead-{i}", references, (10, 11)) for i in range(50))))
            assert len(set(threading.enumerate()) - before) < 10
            consumer.worker.carry(Work(pulls=(pull(producer.address, "d-1", references, (1, 2)),)))
            consumer.until_received("d-1")
            # The dead one is waited for all the time.
            assert consumer.received == ["d-1"]
            assert consumer.holds(0, (1, 2), value)
        consumer.until_received(*(f"dead-{i}" for i in range(50)))
        assert consumer.failed == {f"dead-{i}" for i in range(50)}
        assert consumer.failed_blocks == {10, 11}


def test_a_load_that_waits_for_a_connection_ends_by_its_deadline():
    with impostor(b"", hang_up=False) as port, consuming(transfer_timeout=0.2, connect_timeout=30.0) as consumer:
        with producing() as producer:
            references, _ = producer.export("p-1", (5, 6))
        dead = ProducerAddress("p", "127.0.0.1", port)
        consumer.worker.carry(Work(pulls=(pull(dead, "d-1", references, (1, 2)),)))
        consumer.until_received("d-1")
        assert consumer.failed == {"d-1"}
