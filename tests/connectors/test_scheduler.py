"""The scheduler side with what it uses for real: references that an engine honours, and a directory that answers."""

from __future__ import annotations

import json

import numpy as np
import pytest

import pdkv
from pdkv.connectors.core import inquiry
from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.digest import prefix_digest
from pdkv.connectors.core.scheduler import SchedulerSide
from pdkv.connectors.core.work import RankInfo
from pdkv.errors import ConfigError, ReferenceDigestError

BLOCK_TOKENS = 16
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
TOKENS = list(range(40))


def digest(num_tokens):
    return prefix_digest(TOKENS, num_tokens)


@pytest.fixture
def engine():
    with pdkv.Engine("producer") as engine:
        yield engine


@pytest.fixture
def cache(engine):
    return engine.register_kv_cache(
        {"layer": np.arange(8 * 64, dtype=np.uint8).reshape(8, 64)}, layout="BC", block_tokens=BLOCK_TOKENS
    )


def rank(engine, cache, tp_rank=0):
    return RankInfo(tp_rank, 0, engine.address, engine.incarnation, (cache.issuer().to_bytes(),), ({},))


@pytest.fixture
def side(engine, cache):
    side = SchedulerSide("engine-p", Settings(), [BLOCK_TOKENS], produces=True, consumes=True)
    side.set_ranks([rank(engine, cache)])
    yield side
    side.close()


def finish(side, request_id="p-1", params=ASK, *, complete=True, num_tokens=40):
    return side.finished(request_id, params, ([3, 4, 5],), num_tokens, digest, complete=complete)


def test_what_it_issues_is_what_the_worker_exports_and_a_consumer_pulls(side, cache):
    delay, params = finish(side)
    assert delay
    consumer = SchedulerSide("engine-d", Settings(), [BLOCK_TOKENS], produces=False, consumes=True)
    consumer.arrived("d-1", json.loads(json.dumps(params)), 40)
    assert consumer.match("d-1", 0) == (40, True)
    consumer.allocated("d-1", ([5, 6, 7],), 40, digest)
    (order,) = side.take().exports
    export = cache.export(order.block_ids[0], reference=pdkv.Reference.from_json(order.references[0][0]))
    (pull,) = consumer.take().pulls
    ours = np.zeros((8, 64), np.uint8)
    with pdkv.Engine("consumer", listen=None) as engine:
        into = engine.register_kv_cache({"layer": ours}, layout="BC", block_tokens=BLOCK_TOKENS)
        engine.connect(pdkv.Reference.from_json(pull.references[0][0]).address)
        wrong = bytes([pull.digest[0] ^ 1]) + pull.digest[1:]
        with pytest.raises(ReferenceDigestError):
            into.pull(pull.references[0][0], pull.into[0], digest=wrong).wait(60)
        into.pull(pull.references[0][0], pull.into[0], digest=pull.digest).wait(60)
    assert (ours[[5, 6, 7]] == np.arange(8 * 64, dtype=np.uint8).reshape(8, 64)[[3, 4, 5]]).all()
    assert export.wait(60) == "done"


def test_consumers_are_told_a_directory_that_knows_the_ranks(side, engine):
    _, params = finish(side)
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", side.port)
    told = inquiry.fetch(params["remote_host"], params["remote_port"], 10)
    assert told.engine_id == params["remote_engine_id"]
    assert [known.address for known in told.ranks] == [engine.address]


@pytest.mark.parametrize(
    "how",
    [
        {"complete": False},
        {"params": None},
        {"params": {"do_remote_decode": False}},
        {"num_tokens": 0},
    ],
    ids=["aborted", "no parameters", "not asked for", "nothing computed"],
)
def test_what_is_not_exported(side, how):
    assert finish(side, **how) == (False, None)
    assert not side.take()


def test_a_consumer_exports_nothing_and_a_producer_fetches_nothing(side):
    _, params = finish(side)
    consumer = SchedulerSide("engine-d", Settings(), [BLOCK_TOKENS], produces=False, consumes=True)
    assert finish(consumer) == (False, None)
    producer = SchedulerSide("engine-q", Settings(), [BLOCK_TOKENS], produces=True, consumes=False)
    producer.arrived("r", params, 40)
    assert producer.match("r", 0) == (0, False)
    assert not producer.take()


def test_nothing_is_exported_before_the_ranks_are_known():
    side = SchedulerSide("engine-p", Settings(), [BLOCK_TOKENS], produces=True, consumes=False)
    assert finish(side) == (False, None)


def test_a_missing_rank_is_named(engine, cache):
    side = SchedulerSide("engine-p", Settings(), [BLOCK_TOKENS], tp_size=2, produces=True, consumes=False)
    with pytest.raises(ConfigError, match=r"\(0, 0\).*\(0, 1\)"):
        side.set_ranks([rank(engine, cache)])


def test_a_step_without_news_costs_nothing(side):
    assert side.take() is side.take()


def test_a_bug_of_ours_does_not_reach_the_engine(monkeypatch, side, caplog):
    def broken(*_args, **_kwargs):
        raise IndexError("tuple index out of range")

    for name in ("arrived", "turned_down", "match", "allocated", "finished"):
        monkeypatch.setattr(side._consumer, name, broken)
    monkeypatch.setattr(side._producer, "export", broken)
    side.arrived("r", {}, 1)
    side.turned_down({})
    side.allocated("r", ([],), 1, digest)
    assert side.match("r", 0) == (0, False)
    assert finish(side) == (False, None)
    assert caplog.text.count("Traceback") == 6


def test_news_for_the_workers_are_pending_until_they_are_taken(side):
    assert not side.pending
    _, params = finish(side)
    assert side.pending
    side.take()
    assert not side.pending
    consumer = SchedulerSide("engine-d", Settings(), [BLOCK_TOKENS], produces=False, consumes=True)
    consumer.arrived("d-1", params, 40)
    consumer.take()
    consumer.finished("d-1", params, ([],), 0, digest, complete=False)
    assert consumer.pending
    assert len(consumer.take().declines) == 1
    assert not consumer.pending


def test_close_twice_is_no_error(side):
    side.close()
    side.close()


def test_what_a_rank_tells_shows_no_key(engine, cache):
    info = rank(engine, cache)
    assert "issuer" not in repr(info)
    assert engine.address in repr(info)
