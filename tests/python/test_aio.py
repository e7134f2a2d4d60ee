"""Transfers in coroutines: awaited without threads, from several loops, cancelled and failing."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

import pdkv
from pdkv import aio

BLOCKS = 64


class Engines(NamedTuple):
    """A producer and a consumer, connected after both have registered their caches."""

    producer: pdkv.Engine
    consumer: pdkv.Engine


@pytest.fixture
def pair():
    memory = [np.zeros((4, BLOCKS, 1, 16, 256), np.uint8) for _ in range(2)]
    memory[0][:] = 5
    with pdkv.Engine("producer", transports=["tcp"]) as a, pdkv.Engine("consumer", transports=["tcp"]) as b:
        engines = Engines(a, b)
        caches = [
            engine.register_kv_cache(kv, layout="LBHNC", block_tokens=16)
            for engine, kv in zip(engines, memory, strict=True)
        ]
        b.connect(a.address)
        yield engines, caches, memory


def pull(caches, ids):
    return caches[1].pull(caches[0].export(ids).reference, into=ids)


def test_await(pair):
    _, caches, memory = pair

    async def main():
        transfer = pull(caches, range(BLOCKS))
        assert await transfer is None
        return transfer

    transfer = asyncio.run(main())
    assert transfer.done
    assert (memory[1] == 5).all()


def test_many_at_once_and_again(pair):
    _, caches, memory = pair

    async def main():
        for _ in range(5):
            await asyncio.gather(*(aio.wait(pull(caches, [block])) for block in range(BLOCKS)))

    asyncio.run(main())
    assert (memory[1] == 5).all()
    assert not aio._Watcher._all


def test_what_ended_before_needs_no_loop_turn(pair):
    _, caches, _ = pair
    transfer = pull(caches, [1])
    transfer.wait(60)

    async def main():
        await transfer
        await transfer

    asyncio.run(main())


def test_failures_are_raised(pair):
    _, caches, _ = pair

    async def main():
        export = caches[0].export([1], digest=b"a")
        await caches[1].pull(export.reference, into=[1], digest=b"b")

    with pytest.raises(pdkv.ReferenceDigestError):
        asyncio.run(main())


def test_cancelling_the_task_leaves_the_transfer_alone(pair):
    engines, _, _ = pair

    class Endless:
        """A transfer that never ends."""

        engine = engines.consumer

        def poll(self):
            return False

    async def main():
        task = asyncio.ensure_future(aio.wait(Endless()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not aio._Watcher._all


def test_two_loops_share_one_engine(pair):
    _, caches, memory = pair

    async def main(first):
        for block in range(first, BLOCKS, 2):
            await asyncio.wait_for(aio.wait(pull(caches, [block])), 60)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda first: asyncio.run(main(first)), range(2)))
    assert (memory[1] == 5).all()


def test_everybody_has_completions_of_their_own(pair):
    engines, caches, _ = pair
    with engines.consumer.completions() as one, engines.consumer.completions() as other:
        transfer = pull(caches, [1])
        for completions in (one, other):
            assert select.select([completions], [], [], 60)[0] == [completions]
            assert completions.take() == [transfer.id]
            assert completions.take() == []
            assert select.select([completions], [], [], 0)[0] == []
        transfer.wait(60)
    with pytest.raises(pdkv.ClosedError):
        one.take()
    with pytest.raises(pdkv.ClosedError):
        one.fileno()
    one.close()


def test_nobody_takes_what_asyncio_waits_for(pair):
    engines, caches, _ = pair
    over = threading.Event()

    def take_all(completions):
        while not over.is_set():
            completions.take()

    async def main():
        for _ in range(200):
            await asyncio.wait_for(aio.wait(pull(caches, [1])), 60)

    with engines.consumer.completions() as completions, ThreadPoolExecutor(1) as threads:
        thief = threads.submit(take_all, completions)
        try:
            asyncio.run(main())
        finally:
            over.set()
        thief.result(60)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from 3.12 on for whoever forks with threads
def test_a_forked_child_takes_nothing_from_its_parent(pair):
    engines, caches, _ = pair
    with engines.consumer.completions() as completions:
        transfer = pull(caches, [1])
        transfer.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(len(completions.take()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert select.select([completions], [], [], 60)[0] == [completions]
        assert completions.take() == [transfer.id]


def test_who_waits_for_completions_hears_of_the_close(pair):
    engines, caches, _ = pair
    with engines.consumer.completions() as completions:
        transfer = pull(caches, [1])
        transfer.wait(60)
        engines.consumer.close()
        assert completions.take() == [transfer.id]
        for _ in range(2):
            assert select.select([completions], [], [], 0)[0] == [completions]
            with pytest.raises(pdkv.ClosedError, match="the engine is closed"):
                completions.take()
    with pytest.raises(pdkv.ClosedError):
        engines.consumer.completions()


def test_a_close_ends_what_asyncio_waits_for(pair):
    engines, caches, _ = pair
    # The other end may be heard to hang up first.
    ends = (pdkv.ClosedError, pdkv.PeerLostError)

    async def main():
        # Of blocks that are not exported yet: the producer keeps it waiting.
        transfer = caches[1].pull(caches[0].issuer().issue(num_blocks=1, num_tokens=16), into=[1], timeout_s=600)
        waiting = asyncio.create_task(aio.wait(transfer))
        await asyncio.sleep(0)
        (watcher,) = aio._Watcher._all[engines.consumer.incarnation].values()
        engines.consumer.close()
        # A loop may look more than once before the task runs.
        watcher._wake()
        watcher._wake()
        with pytest.raises(ends):
            await asyncio.wait_for(waiting, 60)
        # Another await of it needs no watcher.
        with pytest.raises(ends):
            await transfer

    asyncio.run(main())
