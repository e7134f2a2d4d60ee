"""A producer and a consumer without an LLM engine: worker sides over numpy arrays, and what orders them about."""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager

import numpy as np

from pdkv._core import Issuer
from pdkv.connectors.core.caches import GroupCache
from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.directory import Directory
from pdkv.connectors.core.stats import COUNTERS
from pdkv.connectors.core.work import ExportOrder, ProducerAddress, PullOrder, Results, Work
from pdkv.connectors.core.worker import WorkerSide

BLOCKS = 64
DIGEST = b"d" * 48
PATIENCE_S = 60.0
numbers = itertools.count()


def until(true, what="it", patience_s=PATIENCE_S):
    end = time.monotonic() + patience_s
    while not (value := true()):
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.002)
    return value


def pages(groups=1, layers=2, blocks=BLOCKS, heads=2, dtype=np.float32):
    """For each group its layers, every block of them zero."""
    return [
        {f"layers.{layer}": np.zeros((blocks, heads, 16, 64), dtype) for layer in range(group, layers * groups, groups)}
        for group in range(groups)
    ]


class Side:
    """One rank, and what it has reported so far."""

    def __init__(
        self, name, groups=1, *, layers=2, blocks=BLOCKS, heads=2, model="m", ranks=None, device=None, **settings
    ):
        self.pages = pages(groups, layers, blocks, heads)
        self.worker = WorkerSide(
            name,
            Settings(**settings),
            [GroupCache(tensors, "BHNC", 16) for tensors in self.pages],
            model=model,
            device=device,
            **(ranks or {}),
        )
        self.received, self.sent = [], []
        self.failed, self.failed_blocks = set(), set()

    def fill(self, group, block_ids, value):
        for layer, tensor in enumerate(self.pages[group].values()):
            for position, block in enumerate(block_ids):
                tensor[block] = value + position + 1000 * layer + 100_000 * group

    def holds(self, group, block_ids, value, first=0):
        return all(
            (tensor[block] == value + first + position + 1000 * layer + 100_000 * group).all()
            for layer, tensor in enumerate(self.pages[group].values())
            for position, block in enumerate(block_ids)
        )

    def look(self):
        """Takes what has ended; a request that is reported twice is an error."""
        results = self.worker.results()
        assert isinstance(results, Results)
        assert results.failed <= results.received
        for name, into in (("received", self.received), ("sent", self.sent)):
            twice = getattr(results, name) & set(into)
            assert not twice, f"{name} twice: {twice}"
            into += getattr(results, name)
        self.failed |= results.failed
        self.failed_blocks |= results.failed_blocks
        return results

    def until_received(self, *request_ids):
        until(lambda: (self.look(), set(request_ids) <= set(self.received))[1], f"the end of {request_ids}")

    def until_sent(self, *request_ids):
        until(lambda: (self.look(), set(request_ids) <= set(self.sent))[1], f"the end of {request_ids}")

    def counts(self):
        """The counters that are not zero, since the last call."""
        snapshot = self.worker.stats.snapshot_and_reset() or {}
        return {name: snapshot[name] for name in COUNTERS if snapshot.get(name)}


class Producing(Side):
    """A producer: rank 0 of one, its directory, and the mint that its scheduler side would have."""

    def __init__(self, name="producer", groups=1, *, engine_id="p", port=0, **how):
        super().__init__(name, groups, **how)
        self.engine_id = engine_id
        self.directory = Directory(engine_id, [self.worker.info], port=port)
        self.issuers = [Issuer.from_bytes(data) for data in self.worker.info.issuers]
        self.address = ProducerAddress(engine_id, "127.0.0.1", self.directory.port)

    def mint(self, block_ids, digest=DIGEST, consumers=1):
        """References of one rank for blocks of each group."""
        return (
            tuple(
                issuer.issue(
                    num_blocks=len(ids), num_tokens=16 * len(ids), digest=digest, consumers=consumers
                ).to_json()
                for issuer, ids in zip(self.issuers, block_ids, strict=True)
            ),
        )

    def export(self, request_id, *block_ids, lease_s=60.0, **how):
        """Exports blocks of each group, filled with the request's number; gives the references and the number."""
        value = 7 * next(numbers)
        for group, ids in enumerate(block_ids):
            self.fill(group, ids, value)
        references = self.mint(block_ids, **how)
        self.worker.carry(Work(exports=(ExportOrder(request_id, references, block_ids, lease_s),)))
        return references, value

    def close(self):
        self.directory.close()
        self.worker.close()


def pull(producer, request_id, references, *into, first_blocks=None, digest=DIGEST):
    first_blocks = first_blocks or (0,) * len(into)
    return PullOrder(request_id, producer, references, digest, into, first_blocks, 16 * len(into[0]))


@contextmanager
def producing(*args, **how):
    side = Producing(*args, **how)
    try:
        yield side
    finally:
        side.close()


@contextmanager
def consuming(name="consumer", groups=1, **how):
    side = Side(name, groups, **how)
    try:
        yield side
    finally:
        side.worker.close()
