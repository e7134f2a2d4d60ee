"""Who is chosen, and what is counted, without any socket."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pdkv.proxy.answers import FailedError
from pdkv.proxy.instances import Pool, Role
from pdkv.proxy.metrics import Metrics

URLS = ("http://a", "http://b", "http://c")


def pool(role=Role.PREFILL, metrics=None):
    made = Pool(role, URLS, metrics or Metrics())
    for instance in made.instances:
        instance.tell(healthy=True, why="a test")
    return made


def test_nobody_takes_part_until_it_is_well():
    made = Pool(Role.DECODE, URLS, Metrics())
    assert not made.healthy
    with pytest.raises(FailedError) as failure, made.lease(1):
        pass
    assert (failure.value.answer.status, failure.value.outcome) == (503, "unavailable")
    made.instances[1].tell(healthy=True, why="a test")
    assert made.healthy
    assert made.next() is made.instances[1]


def test_equals_take_turns():
    made = pool()
    chosen = []
    for _ in range(6):
        with made.lease(10) as instance:
            chosen.append(instance.url)
    assert chosen == [*URLS, *URLS]


def test_prefill_goes_where_fewest_tokens_are_and_decode_where_fewest_requests_are():
    for role, expected in [(Role.PREFILL, "http://b"), (Role.DECODE, "http://c")]:
        made = pool(role)
        with ExitStack() as stack:
            for tokens in (1000, 10, 100):
                stack.enter_context(made.lease(tokens))
            a, b, c = made.instances
            stack.enter_context(b.busy(10, 9))
            stack.enter_context(a.busy(10, 9))
            assert made.next().url == expected
            assert [one.requests for one in (a, b, c)] == [2, 2, 1]


def test_a_prompt_of_no_tokens_is_load_too():
    made = pool()
    with made.lease(0) as first, made.lease(0) as second:
        assert first is not second
        assert first.tokens == 1


def test_those_that_were_tried_are_left_out():
    made = pool()
    a, b, c = made.instances
    assert made.next([a, b]) is c
    assert made.next([a, b, c]) is None


def test_counts_return_to_zero_whatever_happens():
    metrics = Metrics()
    made = pool(metrics=metrics)
    series = 'pdkv_proxy_in_flight_tokens{instance="http://a",role="prefill"}'

    def fail():
        with made.lease(5):
            assert (
                'pdkv_proxy_in_flight_tokens{instance="http://a",role="prefill"} 5.0' in metrics.render().body.decode()
            )
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert {(one.requests, one.tokens) for one in made.instances} == {(0, 0)}
    assert f"{series} 0.0" in metrics.render().body.decode()


def test_an_instance_that_refused_is_out_at_once_and_one_that_broke_off_is_looked_at():
    made = pool()
    a, b, _ = made.instances
    a.suspect("no", refused=True)
    b.suspect("broke off", refused=False)
    assert (a.healthy, a.look.is_set()) == (False, True)
    assert (b.healthy, b.look.is_set()) == (True, True)
