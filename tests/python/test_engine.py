"""The whole way in one process: register, export, pull, push, read, write, over every transport."""

from __future__ import annotations

import gc
import json
import pickle
import time
import weakref

import numpy as np
import pytest

import pdkv

TRANSPORTS = ["inproc", "shm", "cma", "tcp"]
LAYERS, B, H, N, C = 3, 32, 2, 16, 8


class Side:
    """One engine with a cache in a pool, so that every transport can reach it."""

    def __init__(self, name, **settings):
        self.engine = pdkv.Engine(name, **settings)
        self.pool = self.engine.allocate(LAYERS * B * H * N * C * 2, huge_pages=False)
        self.kv = np.frombuffer(self.pool, np.uint16).reshape(LAYERS, B, H, N, C)
        self.cache = self.engine.register_kv_cache(self.kv, layout="LBHNC", block_tokens=N, model="tiny")

    def fill(self):
        self.kv[:] = np.arange(self.kv.size, dtype=np.uint16).reshape(self.kv.shape)


@pytest.fixture(params=TRANSPORTS)
def sides(request):
    producer, consumer = (Side(name, transports=[request.param]) for name in ("producer", "consumer"))
    with producer.engine, consumer.engine:
        producer.fill()
        yield producer, consumer


@pytest.fixture
def pair():
    producer, consumer = Side("producer"), Side("consumer")
    with producer.engine, consumer.engine:
        producer.fill()
        consumer.engine.connect(producer.engine.address)
        yield producer, consumer


def test_pull(sides):
    producer, consumer = sides
    consumer.engine.connect(producer.engine.address)
    export = producer.cache.export([5, 9, 2], num_tokens=40, digest=b"prefix")
    reference = pdkv.Reference.from_json(export.reference.to_json())
    transfer = consumer.cache.pull(reference, into=np.array([30, 7, 31]), digest=b"prefix")
    transfer.wait(timeout_s=60)
    assert (consumer.kv[:, [30, 7, 31]] == producer.kv[:, [5, 9, 2]]).all()
    untouched = np.setdiff1d(np.arange(B), [30, 7, 31])
    assert not consumer.kv[:, untouched].any()
    assert (transfer.state, transfer.done, transfer.destination, transfer.error) == ("done", True, "valid", None)
    assert transfer.wait_quiesced(timeout_s=60)
    assert transfer.stats.bytes == LAYERS * 3 * H * N * C * 2
    assert transfer.stats.staged_bytes == 0
    assert export.wait(timeout_s=60) == "done"


def test_pull_of_some_layers_and_blocks(pair):
    producer, consumer = pair
    export = producer.cache.export(range(8))
    consumer.cache.pull(export.reference, into=[0, 1], first_block=3, layers=(1, 1)).wait(60)
    assert (consumer.kv[1, [0, 1]] == producer.kv[1, [3, 4]]).all()
    assert not consumer.kv[[0, 2]].any()


def test_push(sides):
    producer, consumer = sides
    producer.engine.connect(consumer.engine.address)
    offer = consumer.cache.offer([1, 2, 3])
    assert offer.reference.kind == "offer"
    transfer = producer.cache.push(offer.reference.to_json(), [10, 11, 12])
    transfer.wait(60)
    assert offer.wait(60) == "filled"
    assert offer.wait_quiesced(60)
    assert (consumer.kv[:, [1, 2, 3]] == producer.kv[:, [10, 11, 12]]).all()


def test_path_and_stats(pair):
    producer, consumer = pair
    transfer = consumer.cache.pull(producer.cache.export([1]).reference, into=[1], require="tcp")
    transfer.wait(60)
    assert transfer.path == "tcp"
    assert transfer.path != "shm"
    assert str(transfer.path) == "tcp"
    assert hash(transfer.path) == hash("tcp")
    assert transfer.path.detail
    stats = dict(transfer.stats)
    assert set(stats) == {"bytes", "runs", "staged_bytes", "plan_us", "post_us", "wire_us", "handover_us"}
    assert stats["bytes"] == transfer.stats.bytes
    with pytest.raises(KeyError):
        transfer.stats["nothing"]


def test_raw_read_and_write(sides):
    producer, consumer = sides
    theirs = producer.engine.allocate(1 << 16, huge_pages=False)
    ours = consumer.engine.allocate(1 << 16, huge_pages=False)
    source, target = (np.frombuffer(pool, np.uint8) for pool in (theirs, ours))
    source[:] = np.arange(source.size) % 251
    region, far = consumer.engine.register(target), producer.engine.register(source)
    descriptor = pdkv.RegionDescriptor.from_json(far.describe().to_json())
    peer = consumer.engine.connect(producer.engine.address)

    peer.read(region.span(100, 50), descriptor.span(7, 50)).wait(60)
    assert (target[100:150] == source[7:57]).all()
    assert not target[:100].any()

    pairs = np.array([[0, 10], [50, 20]])
    peer.read((region, pairs), [descriptor.span(1000, 10), descriptor.span(2000, 20)]).wait(60)
    assert (target[:10] == source[1000:1010]).all()
    assert (target[50:70] == source[2000:2020]).all()

    target[:] = 1
    peer.write(descriptor, region, notify=b"all of it").wait(60)
    assert (source == 1).all()
    assert arrived(producer.engine) == [("consumer", b"all of it")]


def arrived(engine):
    """Notifications come on the control channel; they may be a moment behind."""
    for _ in range(12_000):
        if found := engine.notifications():
            return found
        time.sleep(0.005)
    return []


def test_notify(pair):
    producer, consumer = pair
    peer = consumer.engine.connect(producer.engine.address)
    peer.notify(b"hello")
    assert arrived(producer.engine) == [("consumer", b"hello")]


def test_tensors_in_a_pool_are_shared_and_others_are_not(pair):
    producer, _ = pair
    shared = producer.engine.register(np.frombuffer(producer.pool, np.uint8)[100:200])
    private = producer.engine.register(bytearray(100))
    assert (shared.shared, private.shared) == (True, False)
    assert (shared.nbytes, private.nbytes) == (100, 100)


def test_parts_of_a_pool_are_their_own_regions():
    with pdkv.Engine("a", transports=["tcp"]) as a, pdkv.Engine("b", transports=["tcp"]) as b:
        pool = a.allocate(4096, huge_pages=False)
        memory = np.frombuffer(pool, np.uint8)
        memory[:] = np.arange(4096) % 256
        part = a.register(memory[256:512])
        target = np.zeros(256, np.uint8)
        region = b.register(target)
        assert part.span(3, 4).offset == 3
        b.connect(a.address).read(region, part.describe()).wait(60)
        assert (target == memory[256:512]).all()
        with pytest.raises(pdkv.RegionError, match="not a part of"):
            part.span(200, 100)


def test_regions_keep_their_tensor_and_descriptors_pickle(pair):
    producer, _ = pair
    tensor = np.zeros(64, np.uint8)
    region = producer.engine.register(tensor, name="mine")
    assert region.tensor is tensor
    descriptor = region.describe()
    assert pickle.loads(pickle.dumps(descriptor)) == descriptor
    assert hash(pickle.loads(pickle.dumps(descriptor))) == hash(descriptor)
    region.deregister()
    with pytest.raises(pdkv.RegionError):
        region.deregister()


def test_references_are_values(pair):
    producer, _ = pair
    reference = producer.cache.export([1, 2], num_tokens=20, digest=b"d", consumers=3).reference
    assert pickle.loads(pickle.dumps(reference)) == reference
    assert reference in {pdkv.Reference.from_json(reference.to_json())}
    assert (reference.engine, reference.address) == ("producer", producer.engine.address)
    assert (reference.num_tokens, reference.num_blocks, reference.consumers) == (20, 2, 3)
    assert (reference.digest, reference.kind) == (b"d", "export")
    assert reference.fingerprint == producer.cache.fingerprint
    assert reference.incarnation == producer.engine.incarnation


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"engine": 5}', "\x00"])
def test_garbage_is_no_reference(text):
    for kind in (pdkv.Reference, pdkv.RegionDescriptor):
        with pytest.raises((pdkv.ConfigError, pdkv.ReferenceForgedError)):
            kind.from_json(text)


def test_every_bad_reference_has_its_own_error(pair):
    producer, consumer = pair

    def outcome(reference, **options):
        with pytest.raises(pdkv.PdkvError) as caught:
            consumer.cache.pull(reference, into=[0], **options).wait(60)
        assert not consumer.kv[:, 0].any()
        return type(caught.value)

    used = producer.cache.export([1]).reference
    consumer.cache.pull(used, into=[1]).wait(60)
    assert outcome(used) is pdkv.ReferenceUsedError
    released = producer.cache.export([1])
    released.release()
    released.release()
    assert outcome(released.reference) is pdkv.ReferenceReleasedError
    expired = producer.cache.export([1], lease_s=0.05)
    assert expired.wait(60) == "expired"
    assert outcome(expired.reference) is pdkv.ReferenceExpiredError
    assert outcome(producer.cache.export([1], digest=b"a").reference, digest=b"b") is pdkv.ReferenceDigestError
    gone = producer.engine.register_kv_cache(producer.kv, layout="LBHNC", block_tokens=N, model="tiny")
    reference = gone.export([1]).reference
    gone.deregister()
    # Unknown once the consumer has heard that the cache is gone, released as long as it asks the owner.
    assert outcome(reference) in (pdkv.ReferenceUnknownError, pdkv.ReferenceReleasedError)
    other = producer.engine.register_kv_cache(producer.kv, layout="LBHNC", block_tokens=N, model="another")
    assert outcome(other.export([1]).reference) is pdkv.HandshakeError  # before anything is asked of the owner
    text = producer.cache.export([1], num_tokens=16).reference.to_json()
    assert outcome(text.replace('"num_tokens":16', '"num_tokens":17')) is pdkv.ReferenceForgedError


def test_no_lease_is_cut_without_a_word(pair):
    producer, consumer = pair
    for pin in (producer.cache.export, producer.cache.offer):
        with pytest.raises(pdkv.ConfigError, match="`7200s`, longer than any may be") as caught:
            pin([1], lease_s=7200)
        assert "3600s" in caught.value.hint
        pin([1], lease_s=3600).release()
    export = producer.cache.export([1], lease_s=60)
    with pytest.raises(pdkv.ConfigError, match="`7200s`"):
        export.renew(7200)
    assert 60 < export.renew(3600) <= 3600
    peer = consumer.engine.connect(producer.engine.address)
    assert 60 < peer.renew(export.reference, 7200, timeout_s=60) <= 3600  # the owner says what it gives
    export.release()
    with pytest.raises(pdkv.ReferenceReleasedError) as caught:
        export.renew(1)
    assert caught.value.operation == "renew"


def test_how_long_a_transfer_may_keep_blocks_is_the_owners_to_say():
    with (
        pdkv.Engine("owner", transports=["tcp"], max_claim_s=0.001) as owner,
        pdkv.Engine("consumer", listen=None, transports=["tcp"]) as consumer,
    ):
        # 64 MiB take longer than a millisecond anywhere.
        ours, theirs = (
            engine.register_kv_cache(np.empty((1, 64, 1, 16, 1 << 16), np.uint8), layout="LBHNC", block_tokens=16)
            for engine in (owner, consumer)
        )
        consumer.connect(owner.address)
        transfer = theirs.pull(ours.export(range(64)).reference, into=range(64), timeout_s=600)
        with pytest.raises(pdkv.TransferTimeoutError):
            transfer.wait(600)


def test_whether_a_pull_would_wait_can_be_known_before(pair):
    """A cache that its owner has not told of it may be about to."""
    producer, consumer = pair
    reference = producer.cache.export([1]).reference
    peer = consumer.engine.connect(producer.engine.address)
    assert peer.await_cache(reference, timeout_s=60)
    assert peer.await_cache(reference)
    made_up = json.loads(reference.to_json())
    made_up = json.dumps(made_up | {"cache": made_up["cache"] + 1000})
    assert not peer.await_cache(made_up)
    with pytest.raises(pdkv.ReferenceUnknownError):
        peer.await_cache(made_up, timeout_s=60)
    assert not peer.await_cache(made_up)
    peer.close()
    with pytest.raises(pdkv.PeerLostError):
        peer.await_cache(reference)


def test_a_failed_transfer_says_why_without_raising(pair):
    producer, consumer = pair
    reference = producer.cache.export([1], digest=b"a").reference
    transfer = consumer.cache.pull(reference, into=[0], digest=b"b")
    with pytest.raises(pdkv.ReferenceDigestError):
        transfer.wait(60)
    assert isinstance(transfer.error, pdkv.ReferenceDigestError)
    assert (transfer.state, transfer.destination, transfer.poll()) == ("failed", "untouched", True)


def test_read_only_memory_is_never_a_destination(pair):
    producer, consumer = pair
    consumer.kv.flags.writeable = False
    with pdkv.Engine("reader") as engine:
        cache = engine.register_kv_cache(consumer.kv, layout="LBHNC", block_tokens=N, model="tiny")
        engine.connect(producer.engine.address)
        with pytest.raises(pdkv.RegionError, match="read-only"):
            cache.offer([1])
        with pytest.raises(pdkv.RegionError, match="read-only"):
            cache.pull(producer.cache.export([1]).reference, into=[1])
        assert cache.export([1]).state == "active"
        source = engine.register(b"constant bytes")
        assert source.readonly
        with pytest.raises(pdkv.RegionError, match="read-only"):
            engine.register(b"constant bytes", raw_access=True)
        with pytest.raises(pdkv.RegionError, match="read-only"):
            engine.register(b"constant" * 4096, adopt=True)


def test_read_only_memory_can_be_sent():
    with pdkv.Engine("a") as a, pdkv.Engine("b") as b:
        target = bytearray(14)
        far = b.register(target)
        peer = a.connect(b.address)
        near = a.register(b"constant bytes")
        peer.write(far.describe(), near).wait(60)
        assert target == b"constant bytes"
        with pytest.raises(pdkv.RegionError, match="read-only"):
            peer.read(near, far.describe())
        with pytest.raises(pdkv.PdkvError):
            b.connect(a.address).write(near.describe(), far).wait(60)


def test_regions_of_the_wrong_engine_are_refused(pair):
    producer, consumer = pair
    mine, theirs = consumer.engine.register(bytearray(8)), producer.engine.register(bytearray(8))
    peer = consumer.engine.connect(producer.engine.address)
    with pytest.raises(pdkv.RegionError, match="this engine"):
        peer.read(theirs, theirs.describe())
    with pytest.raises(pdkv.RegionError, match="not one of producer"):
        peer.read(mine, mine.describe())
    for nonsense in (7, "span", [mine, 7], (mine, "x"), None):
        with pytest.raises(pdkv.RegionError, match="names no registered bytes"):
            peer.read(nonsense, theirs.describe())
    with pytest.raises(pdkv.LayoutError, match="shape"):
        peer.read((mine, np.zeros((2, 3), np.int64)), theirs.describe())
    for pair, bad in (([-8, 8], "`8` bytes from offset `-8`"), ([0, -1], "`-1` bytes from offset `0`")):
        with pytest.raises(pdkv.RegionError, match=f"{bad} are not a part of `8` bytes"):
            peer.read((mine, np.array([pair])), theirs.describe())
    with pytest.raises(pdkv.LayoutError, match="a `ndarray` of `float64`") as caught:
        peer.read((mine, np.array([[0.0, 8.0]])), theirs.describe())
    assert "int64" in caught.value.hint


def test_memory_with_gaps_is_refused(pair):
    producer, _ = pair
    with pytest.raises(pdkv.LayoutError, match="gaps"):
        producer.engine.register(np.zeros((8, 8))[:, ::2])
    with pytest.raises(pdkv.LayoutError, match="empty"):
        producer.engine.register(np.zeros(0))
    assert producer.engine.register(np.zeros((8, 4)).T).nbytes == 256  # dense in another order


def test_settings_are_checked():
    for settings, name in [
        ({"threads": 0}, "threads"),
        ({"tcp_streams": 1000}, "tcp_streams"),
        ({"transports": []}, "transports"),
        ({"transports": ["carrier pigeon"]}, "carrier pigeon"),
        ({"listen": "0.0.0.0:0"}, "0.0.0.0"),
        ({"listen": "nonsense"}, "nonsense"),
        ({"peer_timeout_s": 0.001}, "peer_timeout"),
        ({"heartbeat_s": -1}, "heartbeat_s"),
        ({"staging_bytes": 1}, "`staging_bytes` is `1`"),
        ({"staging_patience_s": 0}, "staging_patience"),
        ({"staging_patience_s": -1}, "staging_patience_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"lease_s": 3601}, "3601s"),
        ({"max_claim_s": 0}, "max_claim"),
        ({"max_claim_s": -1}, "max_claim_s"),
    ]:
        with pytest.raises(pdkv.ConfigError, match=name):
            pdkv.Engine("bad", **settings)
    pdkv.Engine("open", listen="0.0.0.0:0", insecure=True).close()


def test_who_is_connected(pair):
    producer, consumer = pair
    peer = consumer.engine.connect(producer.engine.address)
    assert (peer.name, peer.incarnation, peer.alive) == ("producer", producer.engine.incarnation, True)
    assert peer.address == producer.engine.address
    assert [name for name, _, _ in peer.links()] == ["inproc", "cuda", *TRANSPORTS[1:], "ucx"]
    assert all(isinstance(why, str) for _, _, why in peer.links())
    links = {link.transport: link for link in peer.links()}
    assert links["tcp"] in peer.links()
    assert {name: links[name].gpu for name in ("inproc", "tcp")} == {"inproc": "refused", "tcp": "staged"}
    assert repr(links["tcp"]) == f"<pdkv.Link tcp: usable, {links['tcp'].why}>"
    assert ("producer", True) in consumer.engine.peers
    assert consumer.engine.peer_for(producer.cache.export([1]).reference).name == "producer"
    assert consumer.engine.stats["peers"] >= 1
    peer.close()
    peer.close()
    assert {(link.usable, link.gpu) for link in peer.links()} == {(False, "refused")}
    assert all("was closed here" in why for _, _, why in peer.links())


def test_nobody_there():
    with pdkv.Engine("alone", listen=None) as engine:
        assert engine.address is None
        with pytest.raises(pdkv.PeerUnreachableError):
            engine.connect("127.0.0.1:1", timeout_s=0.5)
        with pytest.raises(ConnectionError):
            engine.connect("127.0.0.1:1", timeout_s=0.5)


def test_closed_is_closed(pair):
    producer, _ = pair
    producer.engine.close()
    producer.engine.close()
    assert producer.engine.closed
    with pytest.raises(pdkv.ClosedError):
        producer.engine.register(bytearray(8))
    with pytest.raises(pdkv.ClosedError):
        producer.cache.export([1])


def test_memory_is_let_go_after_everything_else():
    class Array(np.ndarray):
        """An array that can be watched."""

    engine = pdkv.Engine("short", listen=None)
    tensor = np.zeros(4096, np.uint8).view(Array)
    watch = weakref.ref(tensor)
    region = engine.register(tensor)
    del tensor
    gc.collect()
    assert watch() is not None
    region.deregister()
    engine.close()
    del region, engine
    gc.collect()
    for _ in range(6000):
        if watch() is None:
            break
        pdkv.build_info()
        time.sleep(0.01)
    assert watch() is None


def test_reprs_say_what_things_are(pair):
    producer, consumer = pair
    export = producer.cache.export([1])
    transfer = consumer.cache.pull(export.reference, into=[1])
    transfer.wait(60)
    region = producer.engine.register(bytearray(8))
    things = [
        (producer.engine, "producer"),
        (producer.cache, "32 blocks"),
        (producer.cache.layout, "KvLayout"),
        (export, "1 blocks"),
        (export.reference, "export"),
        (producer.cache.issuer(), "at producer"),
        (transfer, "done over"),
        (transfer.path, "Path"),
        (transfer.stats, "bytes="),
        (region, "8 bytes"),
        (region.describe(), "8 bytes"),
        (region.span(0, 4), "4 bytes"),
        (producer.pool, "bytes at"),
        (pdkv.Shard(2, 2), "2 layers"),
        (consumer.engine.connect(producer.engine.address), "producer"),
    ]
    for thing, part in things:
        assert part in repr(thing)
        assert type(thing).__module__ == "pdkv"
        assert getattr(pdkv, type(thing).__name__) is type(thing)
