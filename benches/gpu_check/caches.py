"""KV caches of the orders that engines use, on one buffer: what pdkv registers, and views to compute with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from gpu_check.arena import Arena, Buffer

ITEM_BYTES = 2
_CANONICAL = "LBHNC"
ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")


@dataclass(frozen=True)
class Geometry:
    """Sizes of a cache, and the order in which its axes lie in memory."""

    layers: int
    blocks: int
    heads: int
    tokens: int
    content: int
    order: str

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.layers * self.blocks * self.heads * self.tokens * self.content * ITEM_BYTES

    @property
    def _sizes(self) -> list[int]:
        by_axis = dict(zip(_CANONICAL, (self.layers, self.blocks, self.heads, self.tokens, self.content), strict=True))
        return [by_axis[axis] for axis in self.order]

    @property
    def _axes(self) -> list[int]:
        return [self.order.index(axis) for axis in _CANONICAL]

    def view(self, arena: Arena, flat: Any) -> Any:
        """Views flat bytes as [layers, blocks, heads, tokens, content]."""
        return arena.shaped(flat, self._sizes, self._axes)

    def array_view(self, array: Any) -> Any:
        """Views the bytes of a numpy array the same way."""
        return array.view(np.int16).reshape(self._sizes).transpose(self._axes)

    def tensors(self, arena: Arena, buffer: Buffer) -> dict[str, Any]:
        """Gives what an engine registers: one [blocks, heads, tokens, content] view for each layer."""
        return {f"layers.{layer}": arena.tensor(buffer, self._sizes, self._axes, layer) for layer in range(self.layers)}

    def plain(self) -> dict[str, Any]:
        """Gives plain values for another process."""
        return dict(self.__dict__)


def pair(draw: Random) -> tuple[Geometry, Geometry]:
    """Draws two caches of one model: same layers, heads, tokens and content; other pools and orders."""
    same = {
        "layers": draw.choice([1, 2, 5]),
        "heads": draw.choice([1, 2, 8]),
        "tokens": draw.choice([4, 16]),
        "content": draw.choice([8, 36, 64, 128]),
    }
    first, second = (Geometry(blocks=draw.randint(8, 40), order=draw.choice(ORDERS), **same) for _ in range(2))
    return first, second


def large_pair() -> tuple[Geometry, Geometry]:
    """Two caches that no single segment of torch's allocator holds: of some 80 MiB, where a segment grows by 20."""
    same = {"layers": 4, "blocks": 610, "heads": 8, "tokens": 16, "content": 128}
    return Geometry(order="LBNHC", **same), Geometry(order="LBHNC", **same)


def tables(draw: Random, src: Geometry, dst: Geometry) -> tuple[list[int], list[int]]:
    """Draws block tables of one length for the two."""
    count = draw.randint(1, min(src.blocks, dst.blocks))
    return draw.sample(range(src.blocks), count), draw.sample(range(dst.blocks), count)


def moved(
    arena: Arena,
    src: Geometry,
    src_flat: Any,
    src_ids: Sequence[int],
    dst: Geometry,
    dst_flat: Any,
    dst_ids: Sequence[int],
) -> Any:
    """Gives what the destination's bytes must be: a copy of `dst_flat` with the blocks of the source in it."""
    expected = copied(dst_flat)
    dst.view(arena, expected)[:, arena.index(dst_ids)] = src.view(arena, src_flat)[:, arena.index(src_ids)]
    return expected


def copied(flat: Any) -> Any:
    """Copies flat bytes, of torch or of numpy."""
    return flat.clone() if hasattr(flat, "clone") else flat.copy()
