"""Calls that take the lock of the engine's state let other threads run: who holds it may be at work for long."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import pdkv
from pdkv.testing import connected_pair


@pytest.fixture(autouse=True)
def _nobody_is_interrupted():
    """A thread keeps the interpreter until it lets go of it by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    yield
    sys.setswitchinterval(before)


def lets_go(call, limit_s):
    """Whether another thread that waits for the interpreter gets it while this one does nothing but make calls."""
    gate, ran = threading.Lock(), []

    def other():
        with gate:
            ran.append(True)

    with gate:
        thread = threading.Thread(target=other)
        thread.start()
    end = time.monotonic() + limit_s
    while not ran and time.monotonic() < end:
        call()
    got_it = bool(ran)
    thread.join()
    return got_it


@pytest.fixture(scope="module")
def calls():
    with connected_pair() as pair:
        memory = np.zeros((1, 8, 1, 16, 8), np.uint8)
        cache = pair.producer.register_kv_cache(memory, layout="LBHNC", block_tokens=16)
        export = cache.export([1], lease_s=3600)
        peer = pair.to_producer
        peer.await_cache(export.reference, timeout_s=60)

        def notify():
            with suppress(pdkv.CapacityError):  # the peer takes them more slowly
                peer.notify(b"")

        yield {
            "notify": notify,
            "await_cache": lambda: peer.await_cache(export.reference),
            "peer_for": lambda: pair.consumer.peer_for(export.reference),
            "peers": lambda: pair.consumer.peers,
            "stats": lambda: pair.consumer.stats,
            "name": lambda: pair.consumer.name,
        }


@pytest.mark.parametrize("name", ["notify", "await_cache", "peer_for", "peers", "stats"])
def test_others_run_meanwhile(calls, name):
    assert lets_go(calls[name], limit_s=30)


def test_what_takes_no_lock_does_not_switch(calls):
    """Nor would the test above see a call that keeps the interpreter."""
    assert not lets_go(calls["name"], limit_s=0.2)
