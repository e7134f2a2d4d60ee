"""Workers of vLLM's connector with their caches on a GPU: blocks go from pages to pages, in the order of the steps."""

from __future__ import annotations

import time
from contextlib import contextmanager

import numpy as np
import pytest
from gpu_check.pattern import random_bytes

from connectors.sides import DIGEST, pull, until
from pdkv._core import CudaLoop, Issuer
from pdkv.connectors.core.caches import GroupCache
from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.directory import Directory
from pdkv.connectors.core.work import ExportOrder, ProducerAddress, Work
from pdkv.connectors.core.worker import WorkerSide
from with_gpu.tensors import Cupy

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 2, 12, 2, 16, 64
BLOCK = HEADS * TOKENS * CONTENT * 2
LAYER = BLOCKS * BLOCK
SLOW_COPIES = 64


class Stream:
    """What `core.device.Device` is: a stream, and marks that have passed when the test has seen them pass."""

    def __init__(self):
        self.loop = CudaLoop()
        self.stream = self.loop.stream
        self.passed = True

    def mark(self):
        return self

    def query(self):
        return self.passed

    def later(self, dst, src, nbytes):
        """Asks for something slow, and then for a copy."""
        for _ in range(SLOW_COPIES):
            self.loop.copy(dst, dst, 1)
        self.loop.copy(dst, src, nbytes)


class End:
    """A worker with one group of layers in a pool of a GPU or of the host."""

    def __init__(self, name, arena, *, order="BHNC", device="cuda:0", **settings):
        self.arena, self.on_gpu = arena, device is not None
        self.stream = Stream() if self.on_gpu else None
        self.memory = arena.empty(LAYERS * LAYER) if self.on_gpu else np.zeros(LAYERS * LAYER // 2, np.float16)
        shape = {"B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
        step, steps = 2, {}
        for axis in reversed(order):
            steps[axis] = step
            step *= shape[axis]
        sizes, strides = zip(*((shape[axis], steps[axis]) for axis in "BHNC"), strict=True)
        tensors = {f"layers.{layer}": self._tensor(layer, sizes, strides) for layer in range(LAYERS)}
        group = GroupCache(tensors, "BHNC", TOKENS)
        self.worker = WorkerSide(name, Settings(**settings), [group], model="m", device=self.stream)

    def _tensor(self, layer, sizes, strides):
        if self.on_gpu:
            return Cupy(self.memory.owner, sizes, "<f2", strides, layer * LAYER)
        flat = self.memory[layer * LAYER // 2 : (layer + 1) * LAYER // 2]
        return np.lib.stride_tricks.as_strided(flat, sizes, strides)

    def fill(self, seed):
        """Random bytes in all pages; gives them."""
        flat = np.asarray(random_bytes(LAYERS * LAYER, seed))
        if self.on_gpu:
            self.arena.write(self.memory, self.arena.flat(flat))
        else:
            self.memory.view(np.uint8)[:] = flat
        return flat.reshape(LAYERS, BLOCKS, BLOCK)

    def holds(self, pages):
        flat = pages.reshape(-1)
        if self.on_gpu:
            return self.arena.wrong(self.memory, self.arena.flat(flat)) == 0
        return bool((self.memory.view(np.uint8) == flat).all())


@contextmanager
def ends(arena, producer=None, consumer=None, **common):
    p = End("producer", arena, **common | (producer or {}))
    d = End("consumer", arena, **common | (consumer or {}))
    directory = Directory("p", [p.worker.info])
    p.address = ProducerAddress("p", "127.0.0.1", directory.port)
    try:
        yield p, d
    finally:
        directory.close()
        for end in (d, p):
            end.worker.close()


def export(p, blocks, step=0):
    [issuer] = (Issuer.from_bytes(data) for data in p.worker.info.issuers)
    reference = issuer.issue(num_blocks=len(blocks), num_tokens=TOKENS * len(blocks), digest=DIGEST, consumers=1)
    references = ((reference.to_json(),),)
    p.worker.carry(Work(exports=(ExportOrder("r", references, (blocks,), 3600.0, step),)))
    return references


def fetch(p, d, references, into):
    d.worker.carry(Work(pulls=(pull(p.address, "d", references, into),)))


def ended(*sides):
    """Looks at the workers until the load has ended; gives what came of it."""
    found = []

    def looked():
        for end in sides:
            results = end.worker.results()
            if results.received:
                found.append(results)
        return found

    until(looked, "the end of the load")
    return found[0]


FROM, INTO = (3, 4, 9), (7, 0, 5)


def moved(there, here):
    here = here.copy()
    here[:, INTO] = there[:, FROM]
    return here


@pytest.mark.parametrize(
    ("producer", "consumer", "path"),
    [
        ({}, {}, "cuda"),
        ({"device": None}, {}, "cuda"),
        ({}, {"device": None}, "cuda"),
    ],
    ids=["gpu to gpu", "host to gpu", "gpu to host"],
)
def test_blocks_of_a_request_are_handed_over(arena, producer, consumer, path):
    with ends(arena, producer, consumer) as (p, d):
        expected = moved(p.fill(1), d.fill(2))
        fetch(p, d, export(p, FROM), INTO)
        results = ended(d)
        assert not results.failed
        assert d.holds(expected)
        until(lambda: p.worker.results().sent, "the producer's blocks")
        assert path in d.worker.stats.snapshot_and_reset()["paths"]


def test_what_the_gpu_has_still_to_write_is_waited_for(arena):
    with ends(arena) as (p, d):
        other = End("other", arena)
        fresh, here = other.fill(3), d.fill(2)
        p.fill(1)
        p.worker.begin_step(1)
        p.stream.later(p.memory.address, other.memory.address, LAYERS * LAYER)
        p.stream.passed = False
        p.worker.begin_step(2)
        fetch(p, d, export(p, FROM, step=1), INTO)
        for _ in range(20):
            assert not p.worker.results().sent
            assert not d.worker.results().received
            time.sleep(0.001)
        p.stream.loop.wait()
        p.stream.passed = True
        assert not ended(p, d).failed
        assert d.holds(moved(fresh, here))
        other.worker.close()


def test_what_the_gpu_has_still_to_read_is_not_overwritten(arena):
    """A step that is under way reads blocks that are a new request's already."""
    with ends(arena) as (p, d):
        other = End("other", arena)
        there, here = p.fill(1), d.fill(2)
        references = export(p, FROM)
        d.worker.begin_step(1)
        d.stream.later(other.memory.address, d.memory.address, LAYERS * LAYER)
        d.worker.begin_step(2)
        fetch(p, d, references, INTO)
        assert not ended(d).failed
        assert d.holds(moved(there, here))
        d.stream.loop.wait()
        assert other.holds(here)
        other.worker.close()


@pytest.mark.parametrize("order", ["BNHC", "HBNC"])
def test_caches_in_different_orders(arena, order):
    """NHD at the one end, HND at the other."""
    with ends(arena, {"order": order}) as (p, d):
        assert p.worker.info.groups[0]["fingerprint"] == d.worker.info.groups[0]["fingerprint"]
        there, here = p.fill(1), d.fill(2)
        axes = {"BNHC": (BLOCKS, TOKENS, HEADS, CONTENT), "HBNC": (HEADS, BLOCKS, TOKENS, CONTENT)}[order]
        pages = there.reshape(LAYERS, -1).view(np.uint16).reshape(LAYERS, *axes)
        pages = pages.transpose(0, *(1 + order.index(axis) for axis in "BHNC"))
        pages = np.ascontiguousarray(pages).view(np.uint8).reshape(LAYERS, BLOCKS, BLOCK)
        fetch(p, d, export(p, FROM), INTO)
        assert not ended(d).failed
        assert d.holds(moved(pages, here))


def test_bytes_go_through_the_hosts_memory_where_that_is_wanted(arena):
    """As with `kv_buffer_device` `cpu` of vLLM."""
    with ends(arena, transports=("tcp",)) as (p, d):
        expected = moved(p.fill(1), d.fill(2))
        fetch(p, d, export(p, FROM), INTO)
        assert not ended(d).failed
        assert d.holds(expected)
        assert "tcp" in d.worker.stats.snapshot_and_reset()["paths"]
