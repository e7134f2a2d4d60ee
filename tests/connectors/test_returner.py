"""Whoever holds the parameters of an export, and is no LLM engine, gives it back."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from connectors.sides import producing, pull
from pdkv.connectors.core.directory import Directory
from pdkv.connectors.core.returner import Returner
from pdkv.connectors.core.work import ExportOrder, Work
from pdkv.errors import PeerUnreachableError, ReferenceRestartedError

PATIENCE_S = 60.0


def params_of(producer, references):
    """As the producer's scheduler side would answer."""
    blob = {"engine_id": producer.engine_id, "references": [[json.loads(text) for text in rank] for rank in references]}
    return {"remote_host": "127.0.0.1", "remote_port": producer.address.port, "pdkv": blob}


@pytest.fixture
def returner():
    returner = Returner()
    yield returner
    returner.close()


def test_the_producer_frees_what_is_given_back_long_before_its_lease_ends(producer, returner):
    references, _ = producer.export("r", (3, 4), lease_s=3600.0)
    assert returner.give(params_of(producer, references), PATIENCE_S)
    producer.until_sent("r")
    assert not producer.counts().get("num_kv_expired_reqs")


def test_every_group_is_given_back(returner):
    with producing(groups=2) as producer:
        references, _ = producer.export("r", (3, 4), (9,), lease_s=3600.0)
        assert returner.give(params_of(producer, references), PATIENCE_S)
        producer.until_sent("r")


@contextmanager
def two_ranks():
    """The ranks of one producer, and what they answer to a request that keeps a block of each."""
    with (
        producing("rank-0", ranks={"tp_rank": 0, "tp_size": 2}) as first,
        producing("rank-1", ranks={"tp_rank": 1, "tp_size": 2}) as second,
    ):
        both = Directory("p", [first.worker.info, second.worker.info])
        try:
            references = tuple(side.mint([(5,)])[0] for side in (first, second))
            for side in (first, second):
                side.worker.carry(Work(exports=(ExportOrder("r", references, ((5,),), 3600.0),)))
            yield (first, second), params_of(first, references) | {"remote_port": both.port}
        finally:
            both.close()


def test_every_rank_is_told(returner):
    with two_ranks() as (ranks, params):
        assert returner.give(params, PATIENCE_S)
        for side in ranks:
            side.until_sent("r")


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_can_not_be_told_keeps_no_other_from_being(gone, returner):
    with two_ranks() as (ranks, params):
        with producing("earlier") as earlier:
            params["pdkv"]["references"][gone] = [json.loads(text) for text in earlier.mint([(5,)])[0]]
        with pytest.raises(ReferenceRestartedError):
            returner.give(params, PATIENCE_S)
        ranks[1 - gone].until_sent("r")
        ranks[gone].look()
        assert not ranks[gone].sent


def test_a_rank_that_is_silent_takes_its_share_of_the_time(returner, monkeypatch):
    clock = SimpleNamespace(now=100.0, ends=[])
    monkeypatch.setattr("pdkv.connectors.core.returner.time", SimpleNamespace(monotonic=lambda: clock.now))

    def silent(directory, references, end):
        clock.ends.append(end)
        clock.now = end
        raise PeerUnreachableError("silent")

    monkeypatch.setattr(returner, "_tell", silent)
    with producing() as producer:
        references = producer.mint([(5,)]) * 4
        with pytest.raises(PeerUnreachableError):
            returner.give(params_of(producer, references), 8.0)
    assert clock.ends == [102.0, 104.0, 106.0, 108.0]


def test_a_directory_is_asked_once_for_all_ranks_though_it_fails(returner, monkeypatch):
    asked = []

    def fetch(host, port, timeout_s):
        asked.append(port)
        raise PeerUnreachableError("silent")

    monkeypatch.setattr("pdkv.connectors.core.returner.fetch", fetch)
    with two_ranks() as (ranks, params):
        with pytest.raises(PeerUnreachableError):
            returner.give(params, PATIENCE_S)
        assert asked == [params["remote_port"]]
        assert not any(side.look().sent for side in ranks)


def test_it_goes_where_it_may():
    with producing() as producer:
        references, _ = producer.export("r", (3,), lease_s=3600.0)
        params = params_of(producer, references)
        for allowed, told in ((["192.0.2.7"], False), (["127.0.0.0/8"], True)):
            returner = Returner(allowed)
            try:
                if told:
                    assert returner.give(params, PATIENCE_S)
                    producer.until_sent("r")
                else:
                    with pytest.raises(PeerUnreachableError, match="allowed_hosts"):
                        returner.give(params, PATIENCE_S)
            finally:
                returner.close()


def test_what_is_not_exported_yet_is_given_back_all_the_same(producer, returner):
    references = producer.mint([(7, 8)])
    assert returner.give(params_of(producer, references), PATIENCE_S)
    producer.worker.carry(Work(exports=(ExportOrder("r", references, ((7, 8),), 3600.0),)))
    producer.until_sent("r")


def test_what_was_fetched_or_given_back_before_stays_as_it_is(producer, consumer, returner):
    references, value = producer.export("r", (3, 4))
    consumer.worker.carry(Work(pulls=(pull(producer.address, "d", references, (1, 2)),)))
    consumer.until_received("d")
    producer.until_sent("r")
    for _ in range(2):
        assert returner.give(params_of(producer, references), PATIENCE_S)
    assert consumer.holds(0, (1, 2), value)
    assert not consumer.failed


def test_the_second_time_nothing_is_dialled(producer, returner):
    """The directory is gone by then."""
    given = [producer.export(name, (block,), lease_s=3600.0)[0] for name, block in (("a", 1), ("b", 2))]
    assert returner.give(params_of(producer, given[0]), PATIENCE_S)
    producer.directory.close()
    assert returner.give(params_of(producer, given[1]), PATIENCE_S)
    producer.until_sent("a", "b")


def test_parameters_that_are_not_pdkvs_are_left_alone(producer, returner):
    references, _ = producer.export("r", (3,))
    params = params_of(producer, references)
    for spoilt in ({}, {"remote_host": "127.0.0.1"}, params | {"pdkv": None}, params | {"remote_port": "no"}):
        assert not returner.give(spoilt, PATIENCE_S)
    for references in (None, "text", [["text"]], [[{"a": []}]], [[{}] * 5000]):
        spoilt = copy.deepcopy(params)
        spoilt["pdkv"]["references"] = references
        assert not returner.give(spoilt, PATIENCE_S)
    assert not producer.sent


def test_a_producer_that_was_restarted_keeps_nothing(producer, returner):
    with producing("later") as other:
        references = other.mint([(1,)])
    with pytest.raises(ReferenceRestartedError):
        returner.give(params_of(producer, references), PATIENCE_S)


def test_a_producer_that_is_gone_is_told_apart(returner):
    with producing() as gone:
        references, _ = gone.export("r", (3,))
        params = params_of(gone, references)
    with pytest.raises(PeerUnreachableError):
        returner.give(params, PATIENCE_S)


def test_a_directory_that_sends_to_another_engine_is_not_believed(producer, returner):
    references, _ = producer.export("r", (3, 4), lease_s=3600.0)
    with producing("other") as other:
        liar = Directory("p", [replace(producer.worker.info, address=other.worker.info.address)])
        try:
            params = params_of(producer, references) | {"remote_port": liar.port}
            for _ in range(2):
                with pytest.raises(ReferenceRestartedError, match="its directory says"):
                    returner.give(params, PATIENCE_S)
        finally:
            liar.close()
