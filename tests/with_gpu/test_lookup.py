"""Blocks of caches on a GPU through a lookup buffer, and through a store, which keeps them in host memory meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_check.pattern import random_bytes

import pdkv
from with_gpu.tensors import Cupy

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 12, 2, 16, 32
SHAPE = (BLOCKS, HEADS, TOKENS, CONTENT)
BLOCK = HEADS * TOKENS * CONTENT * 2
FROM, INTO = [3, 9, 4], [7, 0, 5]
GPU, HOST = "cuda:0", "cpu"


class Side:
    """An engine with a cache in some place, all of it filled."""

    def __init__(self, engine, arena, place, seed):
        self.engine, self._arena = engine, arena
        self.bytes = np.asarray(random_bytes(LAYERS * BLOCKS * BLOCK, seed))
        if place == HOST:
            self._memory = self.bytes.copy()
            pages = self._memory.view(np.float16).reshape(LAYERS, *SHAPE)
            tensors = {f"layers.{layer}": pages[layer] for layer in range(LAYERS)}
        else:
            self._memory = arena.empty(self.bytes.size)
            arena.write(self._memory, self.bytes)
            offsets = (layer * BLOCKS * BLOCK for layer in range(LAYERS))
            pages = (Cupy(self._memory.owner, SHAPE, offset=offset) for offset in offsets)
            tensors = {f"layers.{layer}": tensor for layer, tensor in enumerate(pages)}
        self.cache = engine.register_kv_cache(tensors, layout="BHNC", block_tokens=TOKENS)

    def now(self):
        """All bytes of the cache."""
        return self._memory if isinstance(self._memory, np.ndarray) else self._arena.read(self._memory)

    def with_blocks_of(self, other):
        """What is to be here once blocks of the other side have come."""
        want = self.bytes.reshape(LAYERS, BLOCKS, BLOCK).copy()
        want[:, INTO] = other.bytes.reshape(LAYERS, BLOCKS, BLOCK)[:, FROM]
        return want.reshape(-1)


@pytest.mark.parametrize(("here", "there"), [(GPU, GPU), (GPU, HOST), (HOST, GPU)])
def test_blocks_of_a_prompt_are_selected_into_other_pages(pair, arena, here, there):
    p, d = Side(pair[0], arena, here, 1), Side(pair[1], arena, there, 2)
    tokens, want = np.arange(TOKENS * len(FROM) - 3), d.with_blocks_of(p)
    with (
        pdkv.LookupBuffer(p.engine) as produced,
        pdkv.LookupBuffer(d.engine, d.engine.connect(p.engine.address), library="numpy") as consumed,
    ):
        ticket = produced.insert_blocks(tokens, p.cache, FROM)
        found = consumed.drop_select_into(tokens, d.cache, INTO, timeout_s=60, require="cuda", require_direct=True)
        assert (found.num_tokens, found.num_blocks) == (len(tokens), len(FROM))
        assert found.transfer.stats.staged_bytes == 0
        assert ticket.wait(60) == "taken"
    assert (d.now() == want).all()
    assert (p.now() == p.bytes).all()


def test_blocks_of_a_gpu_are_kept_in_a_store_and_come_back_to_another(pair, arena):
    """From a GPU into host memory, by name to another process's store, and up to the GPU there."""
    p, d = Side(pair[0], arena, GPU, 1), Side(pair[1], arena, GPU, 2)
    want = d.with_blocks_of(p)
    with pdkv.KVStore(pair[0], library="numpy") as kept, pdkv.Engine("keeper") as keeper:
        pages = np.zeros((LAYERS, len(FROM), *SHAPE[1:]), np.float16)
        carry(p, FROM, keeper, pages, down=True)
        kept.put("prompt", pages)
        with pdkv.KVStore(pair[1], [pair[1].connect(pair[0].address)], library="numpy") as other:
            found = other.get("prompt", timeout_s=60)
        assert found is not pages
        carry(d, INTO, keeper, found, down=False)
    assert (d.now() == want).all()


def carry(side, blocks, keeper, pages, *, down):
    """Copies blocks of a cache on a GPU into pages on the host, or those into the blocks, without a stage."""
    tensors = {f"layers.{layer}": pages[layer] for layer in range(LAYERS)}
    host = keeper.register_kv_cache(tensors, layout="BHNC", block_tokens=TOKENS)
    numbers = list(range(len(blocks)))
    if down:
        keeper.connect(side.engine.address)
        source, target, read, written = side.cache, host, blocks, numbers
    else:
        side.engine.connect(keeper.address)
        source, target, read, written = host, side.cache, numbers, blocks
    transfer = target.pull(source.export(read).reference, into=written, require="cuda", require_direct=True)
    transfer.wait(timeout_s=60)
    assert transfer.stats.staged_bytes == 0
    host.deregister()
