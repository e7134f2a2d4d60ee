"""`KVStore`: what it keeps, what goes, and what a peer is told; over pipes that move nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pdkv
from lookup.fake_pipe import fake_pair
from pdkv.lookup_buffer import KVStore
from pdkv.lookup_buffer.remote import Remote
from pdkv.lookup_buffer.words import Kind, Word, pack
from pdkv.testing import connected_pair


@pytest.fixture
def store():
    with KVStore(max_bytes=100) as store:
        yield store


@pytest.fixture
def connected(store):
    """A store without anything, whose only peer is `store`."""
    ours, theirs = fake_pair()
    thread = threading.Thread(target=store._serve, args=(ours, "client"), daemon=True)
    thread.start()
    client = KVStore()
    client._remotes.append(Remote(theirs, "store"))
    client.pipe, client.served = theirs, thread
    yield client
    client.close()
    thread.join(60)
    assert not thread.is_alive()


def test_get_returns_what_was_put_and_leaves_it_there(store):
    value = np.arange(5)
    store.put("a", value)
    assert store.get("a") is value
    assert store.get("a") is value
    assert (store.exists("a"), store.exists("b"), store.get("b")) == (True, False, None)
    assert (len(store), store.used_bytes) == (1, 40)


def test_none_is_not_kept(store):
    store.put("a", np.zeros(1))
    store.put("a", None)
    assert store.get("a") is not None


def test_put_replaces_and_remove_removes(store):
    store.put("a", np.zeros(10))
    store.put("a", np.ones(2))
    assert (store.get("a").tolist(), store.used_bytes) == ([1.0, 1.0], 16)
    assert store.remove("a")
    assert not store.remove("a")
    assert (store.get("a"), store.used_bytes) == (None, 0)


def test_what_was_used_least_recently_goes(store):
    for key in "abc":
        store.put(key, np.zeros(4))
    store.get("a")
    store.put("d", np.zeros(1))
    assert [store.exists(key) for key in "abcd"] == [True, False, True, True]


def test_what_is_refused(store):
    with pytest.raises(pdkv.CapacityError, match="never fit") as caught:
        store.put("a", np.zeros(13))
    assert not caught.value.retryable
    with pytest.raises(pdkv.ConfigError, match="key"):
        store.get("x" * 1025)
    with pytest.raises(pdkv.LayoutError, match="tensor"):
        store.put("a", "text")
    with pytest.raises(pdkv.ConfigError):
        KVStore(max_bytes=0)
    store.close()
    for call in (lambda: store.get("a"), lambda: store.put("a", np.zeros(1)), lambda: store.remove("a")):
        with pytest.raises(pdkv.ClosedError):
            call()


def test_a_peer_is_asked_for_what_is_not_here(store, connected):
    store.put("a", np.arange(3))
    connected.put("b", np.ones(1))
    assert connected.get("a").tolist() == [0, 1, 2]
    assert (connected.exists("a"), connected.exists("c"), connected.get("c", 60)) == (True, False, None)
    assert connected.get("b").tolist() == [1.0]
    assert not connected.remove("a")
    assert store.exists("a")


def test_a_peer_that_is_gone_has_nothing(store, connected):
    store.put("a", np.arange(3))
    connected.pipe.abort()
    assert connected.get("a") is None
    assert not connected.exists("a")


def test_a_value_that_cannot_be_sent_is_the_askers_error_only(store, connected):
    ours = next(iter(store._pipes))
    ours.refuse = pdkv.UnsupportedError("odd")
    store.put("a", np.zeros(1))
    with pytest.raises(pdkv.UnsupportedError, match="odd"):
        connected.get("a")
    ours.refuse = None
    assert connected.get("a") is not None


@pytest.mark.parametrize("garbage", [b"x", pack(Word(Kind.TAKEN, 0)), pack(Word(Kind.GET, 0, 0, b"k" * 2000))], ids=str)
def test_a_peer_that_talks_nonsense_is_cut_off(store, garbage):
    ours, theirs = fake_pair()
    thread = threading.Thread(target=store._serve, args=(ours, "client"), daemon=True)
    thread.start()
    theirs.send_message(garbage)
    thread.join(60)
    assert not thread.is_alive()
    assert not store._pipes


def test_two_stores_find_what_the_other_has():
    with connected_pair() as pair:
        with (
            KVStore(pair.producer, library="numpy") as one,
            KVStore(pair.consumer, [pair.to_producer], library="numpy") as two,
        ):
            one.add_peer(pair.to_consumer)
            one.put("small", np.arange(3))
            two.put("large", np.arange(1_000_000))
            assert two.get("small", 60).tolist() == [0, 1, 2]
            found = one.get("large", 60)
            assert np.array_equal(found, np.arange(1_000_000))
            assert one.get("nothing", 60) is None
            two.close()
            assert one.get("large", 60) is None
        with KVStore(pair.producer, library="numpy", name="other") as one, pytest.raises(pdkv.HandshakeError):
            KVStore(pair.consumer, [pair.to_producer], timeout_s=0.3)
    with KVStore() as alone, pytest.raises(pdkv.ConfigError):
        alone.add_peer(pair.to_producer)
