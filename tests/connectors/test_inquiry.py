"""Whatever a stranger answers is either ranks, typed and small, or a typed refusal; nothing else is raised."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.sides import until
from pdkv.connectors.core import inquiry
from pdkv.connectors.core.caches import compare
from pdkv.connectors.core.inquiry import Ranks, _read, fetch
from pdkv.connectors.core.places import Places
from pdkv.errors import HandshakeError, LayoutError, PeerUnreachableError

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("x" * 2000)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
GROUP = {"fingerprint": "f", "layers": 2, "layout": "as it lies"}
RANK = {"tp_rank": 0, "pp_rank": 0, "address": "127.0.0.1:7000", "incarnation": "a", "groups": [GROUP]}
ANSWER = {"version": 1, "engine_id": "p", "ranks": [RANK]}


@st.composite
def answers(draw):
    """Honest answers in which one thing is something else."""
    answer = json.loads(json.dumps(ANSWER))
    place = draw(st.sampled_from([answer, answer["ranks"][0], answer["ranks"][0]["groups"][0]]))
    name = draw(st.sampled_from([*place, "else"]))
    place[name] = draw(values)
    return answer


def outcome(errors, call, *args):
    """What a call gives, or `None` where it raises one of `errors`, with a message of one short line."""
    try:
        return call(*args)
    except errors as error:
        message = error.message
    assert len(message) < 2000
    assert "\n" not in message
    return None


def read(answer):
    ranks = outcome(HandshakeError, _read, json.dumps(answer).encode(), "`there`", "127.0.0.1")
    assert ranks is None or isinstance(ranks, Ranks)
    return ranks


def check(ranks):
    assert isinstance(ranks.engine_id, str)
    for rank in ranks.ranks:
        assert type(rank.tp_rank) is type(rank.pp_rank) is int
        outcome(LayoutError, compare, [GROUP], rank.groups, "it")
        address = outcome(PeerUnreachableError, Places(None).engine_address, rank.address, "127.0.0.1", "127.0.0.1")
        assert address is None or address.startswith("127.0.0.1:")


def test_the_honest_one_is_read():
    ranks = read(ANSWER)
    assert ranks.engine_id == "p"
    check(ranks)


@settings(deadline=None)
@given(answers())
def test_an_answer_in_which_one_thing_is_odd(answer):
    ranks = read(answer)
    if ranks is not None:
        check(ranks)


@settings(deadline=None)
@given(values)
def test_any_json(answer):
    assert read(answer) is None or isinstance(answer, dict)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(answer):
    assert outcome(HandshakeError, _read, answer, "`there`", "127.0.0.1") is None


@settings(deadline=None)
@given(st.text(max_size=30), st.text(max_size=30), st.lists(st.text(max_size=30), max_size=3) | st.none())
def test_any_address_and_host(told, host, allowed):
    places = Places(allowed)
    outcome(PeerUnreachableError, places.check_directory, host)
    outcome(PeerUnreachableError, places.engine_address, told, host, "10.0.0.7")


def test_a_resolver_that_is_stuck_holds_nobody_up(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **how: gate.wait(60) and [])
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(PeerUnreachableError, match="not looked up in time"):
            fetch("slow.example", 80, 0.1)
    assert time.monotonic() - started < 30
    gate.set()
    monkeypatch.undo()


def test_names_that_are_looked_up_are_bounded(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(inquiry, "_resolvers", threading.BoundedSemaphore(2))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **how: gate.wait(60) and [])
    before = set(threading.enumerate())

    def more():
        return set(threading.enumerate()) - before

    for _ in range(6):
        with pytest.raises(PeerUnreachableError):
            fetch("slow.example", 80, 0.05)
    assert len(more()) <= 2
    with pytest.raises(PeerUnreachableError, match="too many names"):
        fetch("slow.example", 80, 0.05)
    gate.set()
    until(lambda: not more())
    with pytest.raises(PeerUnreachableError, match="no address"):
        fetch("slow.example", 80, 30)
