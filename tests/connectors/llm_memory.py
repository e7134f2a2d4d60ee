"""Memory of a stand-in engine's ranks, filled with numbers that give away whose KV they are.

Each cell holds a number made of the tokens up to its position, so a request that runs on KV of anything but its own
prompt is found out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from connectors.gpu import Gpu, GpuTensor
from connectors.stand_in import Tensor, has

BLOCK_TOKENS = 4
NUM_BLOCKS = 64
NULL_BLOCK = 0
_LAYERS, _HEADS, _SIZE = 2, 2, 2


class FullAttentionSpec(SimpleNamespace):
    """What vLLM calls the specification of a layer's cache."""


class MLAAttentionSpec(SimpleNamespace):
    """The same where there is one head."""


class UniformTypeKVCacheSpecs(SimpleNamespace):
    """The specifications of layers that differ and share block ids."""


class Rank:
    """The memory of one worker, in the form in which the release registers it.

    Args:
        release: The release of vLLM.
        rank: Which of the ranks that share the heads.
        groups: KV groups of the model.
        gpu: Where it is, unless it is the CPU's memory.
        indexer: Whether a narrower cache of bytes stands beside each layer's, as that of an indexer.
    """

    def __init__(self, release: str, rank: int, groups: int, gpu: Gpu | None = None, indexer: bool = False) -> None:
        self.rank, self.gpu, self.indexer = rank, gpu, indexer
        self._by_head = has(release, "0.26.0")
        by_head = (NUM_BLOCKS, _HEADS, BLOCK_TOKENS, 2 * _SIZE)
        by_token = (NUM_BLOCKS, 2, BLOCK_TOKENS, _HEADS, _SIZE)
        self.layers = {
            name: np.zeros(by_head if self._by_head else by_token, np.uint16).view(Tensor if gpu is None else GpuTensor)
            for group in range(groups)
            for name in layer_names(group)
        }
        if indexer:
            narrow = (NUM_BLOCKS, 1, BLOCK_TOKENS, 3) if self._by_head else (NUM_BLOCKS, BLOCK_TOKENS, 3)
            for name in list(self.layers):
                kind = Tensor if gpu is None else GpuTensor
                self.layers[f"{name}.indexer"] = np.zeros(narrow, np.uint8).view(kind)

    def write(self, tokens: list[int], blocks: list[list[int]], positions: range) -> None:
        """What a forward pass over these positions leaves behind."""
        for cells, value, _ in self._cells(tokens, blocks, positions):
            cells[...] = value

    def compute(self, tokens: list[int], blocks: list[list[int]], positions: range) -> None:
        """A forward pass: it is done now, or when the GPU comes to it."""
        if self.gpu is None:
            self.write(tokens, blocks, positions)
        else:
            self.gpu.give(lambda: self.write(tokens, blocks, positions))

    def check(self, tokens: list[int], blocks: list[list[int]], positions: range) -> None:
        """Whether the cache holds what a forward pass over these positions would have left behind."""
        for cells, value, where in self._cells(tokens, blocks, positions):
            assert set(cells.flatten().tolist()) == {value}, f"rank {self.rank}: wrong KV in {where}"

    def _cells(
        self, tokens: list[int], blocks: list[list[int]], positions: range
    ) -> Iterator[tuple[np.ndarray[Any, Any], int, str]]:
        for group, ids in enumerate(blocks):
            for position in positions:
                block, offset = ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                if block == NULL_BLOCK:  # a window has left it behind
                    continue
                mark = zlib.crc32(repr(tokens[: position + 1]).encode())
                for layer, name in enumerate(layer_names(group)):
                    tensor = self.layers[name]
                    value = (mark + 7 * layer + 13 * self.rank + 17 * group) % ((1 << 16) - 1) + 1
                    where = f"layer `{name}`, token {position}, block {block}"
                    yield tensor[block, :, offset], value, where
                    if self.indexer:
                        narrow = self.layers[f"{name}.indexer"]
                        cells = narrow[block, :, offset] if self._by_head else narrow[block, offset]
                        yield cells, value % 255 + 1, f"the indexer's {where}"


def layer_names(group: int) -> list[str]:
    """The layers of a group."""
    return [f"model.{group}.{layer}" for layer in range(_LAYERS)]


def cache_config(groups: int, indexer: bool = False, *, scheduler: bool = False) -> SimpleNamespace:
    """What vLLM tells a connector of the groups: to the scheduler's side, one layer's specification for all of them."""
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=_HEADS, head_size=_SIZE, dtype="uint16")
    narrow = MLAAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=3, dtype="uint8")
    told = []
    for at in range(groups):
        specs: dict[str, Any] = dict.fromkeys(layer_names(at), spec)
        if indexer:
            specs |= {f"{name}.indexer": narrow for name in layer_names(at)}
        several = UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=specs)
        kind = several if indexer and not scheduler else spec
        told.append(SimpleNamespace(layer_names=list(specs), kv_cache_spec=kind))
    return SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=told)
