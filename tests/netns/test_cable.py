"""Two engines that share a cable and nothing else: whatever arrives really went over the network.

On one host a transport can be fast because it secretly shares memory. Here it can't: see `net`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest

from netns import net
from netns.far_end import PAYLOAD_BYTES

REASON = net.why_not()
if REASON and os.environ.get("PDKV_UCX_REQUIRED") == "1":
    pytest.fail(f"required here, but {REASON}", pytrace=False)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# `alone` processes can't so much as name one another. Where UCX may put into a process, pdkv insists on seeing that
# process end, so those two can; that they share nothing nevertheless is UCX's `TLS` and the counters of the cable.
WAYS = {
    "whatever the engine takes": {"alone": True},
    "tcp": {"alone": True, "transports": ["tcp"]},
    "ucx, active messages": {"alone": True, "transports": ["ucx"], "ucx": {"settings": {"TLS": "tcp"}}},
    "ucx, put and get": {
        "alone": False,
        "transports": ["ucx"],
        "ucx": {"settings": {"TLS": "tcp"}, "one_sided": "any"},
    },
}


@contextmanager
def two_engines(**settings):
    with net.cable() as ends:
        fars = []
        try:
            fars += [net.Far(end, seed=seed, **settings) for seed, end in enumerate(ends)]
            yield (*zip(ends, fars, strict=True),)
        finally:
            for far in fars:
                far.close()


def moved(direction, producer, consumer):
    """Moves the blocks; gives what the mover says of it and how many bytes came over the cable meanwhile."""
    (_, source), (end, target) = producer, consumer
    before = end.received_bytes()
    if direction == "pull":
        told = target.do("move", reference=source.do("export"))
    else:
        told = source.do("move", reference=target.do("offer"))
    return told, end.received_bytes() - before


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("way", WAYS)
def test_every_byte_goes_over_the_cable(way, direction):
    with two_engines(**WAYS[way]) as (producer, consumer):
        for stamp in (1, 2):
            producer[1].do("fill", stamp=stamp)
            consumer[1].do("clear")
            told, received = moved(direction, producer, consumer)
            assert told["bytes"] == PAYLOAD_BYTES
            assert received >= PAYLOAD_BYTES, told
            assert consumer[1].do("wrong_bytes", stamp=stamp) == 0
            assert told["transport"] == ("ucx" if "ucx" in way else "tcp")
            if told["transport"] == "ucx":
                assert told["detail"].startswith("put/get" if "put" in way else "active messages"), told
                assert "tcp" in told["detail"], told
                assert not any(shared in told["detail"] for shared in ("posix", "sysv", "cma")), told


def test_the_engine_says_why_it_shares_no_memory():
    with two_engines(alone=True) as (producer, consumer):
        producer[1].do("fill", stamp=1)
        told, _ = moved("pull", producer, consumer)
        lines = {line.split()[0].strip(":`"): line for line in told["reasons"]}
        assert {"inproc", "shm", "cma"} <= lines.keys(), told["reasons"]


def test_the_counters_see_what_does_not_arrive():
    """Without a transfer nothing like the payload is counted: the counters are no constant."""
    with two_engines(alone=True, transports=["tcp"]) as (producer, consumer):
        before = consumer[0].received_bytes()
        producer[1].do("fill", stamp=1)
        assert consumer[0].received_bytes() - before < PAYLOAD_BYTES // 100


def broken_cable(names):
    with net.cable() as ends:
        names += [end.namespace for end in ends]
        assert set(names) <= set(net.ip("netns", "list").split())
        raise RuntimeError("on purpose")


def test_namespaces_go_whatever_happens():
    names = []
    with pytest.raises(RuntimeError, match="on purpose"):
        broken_cable(names)
    assert names
    assert not set(names) & set(net.ip("netns", "list").split())
