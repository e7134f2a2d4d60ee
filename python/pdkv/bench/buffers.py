"""One side's pages: memory of the asked kind, seen as per-layer tensors and as byte offsets of pages.

The pages of every supported layout are contiguous, so a page is an offset; the tensors carry the real
shape and strides, and the engine must find the same offsets from those.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.bench import pattern
from pdkv.bench.cases import Case
from pdkv.bench.pattern import U64
from pdkv.bench.tables import Ids

_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Pages:
    """The pool of one side of a case.

    Holds the memory (`owner`) as long as any view of it is needed.
    """

    def __init__(self, case: Case, engine: Any, *, where: str | None = None) -> None:
        """Allocates the pool and touches every page of it, so that no measured copy pays for that."""
        self.case = case
        self.where = where or case.where
        if self.where == "pool":
            self.owner: Any = engine.allocate(case.pool_bytes)
        else:
            self.owner = mmap.mmap(-1, case.pool_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.owner, dtype=np.uint8)[: case.pool_bytes]
        self.bytes[:: mmap.PAGESIZE] = 0
        layers, blocks, page = case.geometry.layers, case.pool_blocks, case.page_bytes
        layer_first = case.layout.startswith("LB")
        self.layer_stride = blocks * page if layer_first else page
        self.block_stride = page if layer_first else layers * page

    @property
    def address(self) -> int:
        """Where the pool starts."""
        return self.bytes.ctypes.data

    @property
    def whole(self) -> Any:
        """What is registered to have all of it."""
        return self.bytes

    def tensors(self) -> dict[str, Any]:
        """Gives what vLLM would register: one `[B, H, N, C]` view per layer, strides as the layout says."""
        case, geometry = self.case, self.case.geometry
        sizes = {
            "L": geometry.layers,
            "B": case.pool_blocks,
            "H": geometry.kv_heads,
            "N": case.block_tokens,
            "C": geometry.content,
        }
        backing = self.bytes.view(_DTYPES[geometry.item_bytes]).reshape([sizes[axis] for axis in case.layout])
        canonical = backing.transpose([case.layout.index(axis) for axis in "LBHNC"])
        return {f"layers.{layer}": canonical[layer] for layer in range(geometry.layers)}

    def offsets(self, ids: Ids) -> U64:
        """Gives the byte offset of every page of these blocks, layer by layer."""
        layers = np.arange(self.case.geometry.layers, dtype=np.uint64)[:, None] * np.uint64(self.layer_stride)
        blocks = ids.astype(np.uint64)[None, :] * np.uint64(self.block_stride)
        return np.ascontiguousarray((layers + blocks).reshape(-1))

    def keys(self, ids: Ids, stamp: int) -> U64:
        """Gives the pattern key of every page of these blocks, in the order of `offsets`."""
        layers = np.arange(self.case.geometry.layers, dtype=np.uint64)
        return pattern.keys(
            self.case.seed, stamp, np.repeat(layers, len(ids)), np.tile(ids.astype(np.uint64), len(layers))
        )

    def fill(self, ids: Ids, stamp: int, native: pattern.Native | None) -> None:
        """Writes the pattern of `stamp` into these blocks, as their origin."""
        pattern.fill(
            self.bytes, self.offsets(ids), self.case.page_bytes, self.keys(ids, stamp), native, self.case.threads
        )

    def find_wrong(self, ids: Ids, origins: Ids, stamp: int, native: pattern.Native | None) -> pattern.Found:
        """Compares these blocks with the blocks `origins` of the side they came from."""
        return pattern.find_wrong(
            self.bytes, self.offsets(ids), self.case.page_bytes, self.keys(origins, stamp), native, self.case.threads
        )

    def others(self, ids: Ids) -> Ids:
        """Gives the blocks of the pool that are not in `ids`: nothing may ever touch them."""
        free = np.ones(self.case.pool_blocks, dtype=bool)
        free[ids] = False
        return np.flatnonzero(free).astype(np.int64)

    def spans(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """Gives the pages of these blocks as rows of (offset, length), for raw reads and writes."""
        offsets = self.offsets(ids)
        return np.stack([offsets, np.full_like(offsets, self.case.page_bytes)], axis=1)
