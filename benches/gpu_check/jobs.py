"""Random work for the kernels, in their own terms, and which byte goes where by it: numpy's word against theirs.

A job is lanes of pages of one shape. What the shapes stand for is in the names of the generators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from gpu_check.pattern import page_sum

Indices = npt.NDArray[np.int64]
# Pieces from one byte to several tiles, aligned to every width of vector, so that every kernel has its turn.
_CHUNKS = (1, 3, 4, 6, 8, 24, 16, 48, 96, 256, 512, 576, 1024, 1152, 2048, 4096, 5120, 16384, 65536, 98304)
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Side:
    """How the pages of one side lie: bytes from entry to entry of the table, pages of an entry, bytes between those."""

    page_stride: int
    parts: int = 1
    part_stride: int = 0

    def plain(self) -> tuple[int, int, int]:
        """The numbers."""
        return self.page_stride, self.parts, self.part_stride


@dataclass(frozen=True)
class Axis:
    """Pieces along an axis of a page: how many, and the bytes between them at the source and at the destination."""

    count: int = 1
    src_stride: int = 0
    dst_stride: int = 0

    def plain(self) -> tuple[int, int, int]:
        """The numbers."""
        return self.count, self.src_stride, self.dst_stride


@dataclass(frozen=True)
class Job:
    """What one launch copies.

    Attributes:
        kind: What it stands for.
        chunk_bytes: Bytes of a piece.
        src: The source's pages.
        dst: The destination's pages.
        outer: The outer axis of a page.
        inner: The inner axis of a page.
        lanes: Offsets of each lane: (source, destination).
        num_pages: Pages of each lane.
        src_pages: The source's table; `None` where entry `i` is page `i`.
        dst_pages: The destination's table.
        src_bytes: Bytes of the source's memory.
        dst_bytes: Bytes of the destination's memory.
    """

    kind: str
    chunk_bytes: int
    src: Side
    dst: Side
    outer: Axis
    inner: Axis
    lanes: tuple[tuple[int, int], ...]
    num_pages: int
    src_pages: tuple[int, ...] | None
    dst_pages: tuple[int, ...] | None
    src_bytes: int
    dst_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one lane."""
        return self.chunk_bytes * self.outer.count * self.inner.count

    def places(self, end: int) -> Indices:
        """Gives the offset of every byte that moves, of the source (0) or destination (1), by lane, page and piece."""
        side, pages = ((self.src, self.src_pages), (self.dst, self.dst_pages))[end]
        numbers = np.arange(self.num_pages, dtype=np.int64)
        entries = numbers // side.parts
        ids = entries if pages is None else np.asarray(pages, np.int64)[entries]
        at = ids * side.page_stride + numbers % side.parts * side.part_stride
        steps = [np.asarray([lane[end] for lane in self.lanes], np.int64), at]
        for axis in (self.outer, self.inner):
            steps.append(np.arange(axis.count, dtype=np.int64) * axis.plain()[1 + end])
        steps.append(np.arange(self.chunk_bytes, dtype=np.int64))
        return _outer_sum(steps).reshape(-1)

    def sums(self, source: npt.NDArray[np.uint8]) -> list[int]:
        """Gives the checksum of every page over all lanes."""
        content = source[self.places(0)].reshape(len(self.lanes), self.num_pages, self.page_bytes)
        logical = np.arange(len(self.lanes) * self.page_bytes, dtype=np.uint64).reshape(
            len(self.lanes), self.page_bytes
        )
        return [page_sum(logical.reshape(-1), content[:, page].reshape(-1)) for page in range(self.num_pages)]


def _outer_sum(steps: list[Indices]) -> Indices:
    total = steps[0]
    for step in steps[1:]:
        total = total[..., None] + step
    return total


def _tables(draw: Random, entries: int, spare: int) -> tuple[int, ...]:
    """Draws distinct pages, some of them in a row."""
    ids = draw.sample(range(entries + spare), entries)
    if draw.random() < 0.5:
        middle = len(ids) // 2
        ids[:middle] = sorted(ids[:middle])
    return tuple(ids)


def _make(
    draw: Random, kind: str, chunk: int, src: Side, dst: Side, axes: tuple[Axis, Axis], block: tuple[int, int]
) -> Job:
    """Lays lanes out one after the other; `block` is the bytes of a table's entry at each side."""
    per_page = chunk * axes[0].count * axes[1].count
    lanes = draw.choice([1, 2, 3])
    pages = max(1, min(draw.randint(1, 40), _MOST_BYTES // (per_page * lanes)))
    entries = [-(-pages // side.parts) for side in (src, dst)]
    packed = draw.random() < 0.15
    tables = [None if packed and end == 1 else _tables(draw, entries[end], draw.randint(0, 4)) for end in (0, 1)]
    pools = [(max(table) + 1 if table else entries[end]) * block[end] for end, table in enumerate(tables)]
    return Job(
        kind=kind,
        chunk_bytes=chunk,
        src=src,
        dst=dst,
        outer=axes[0],
        inner=axes[1],
        lanes=tuple((lane * pools[0], lane * pools[1]) for lane in range(lanes)),
        num_pages=pages,
        src_pages=tables[0],
        dst_pages=tables[1],
        src_bytes=pools[0] * lanes,
        dst_bytes=pools[1] * lanes,
    )


def whole_pages(draw: Random) -> Job:
    """Blocks of the same layout at both sides, now and then with something between them."""
    chunk = draw.choice(_CHUNKS)
    gaps = [draw.choice([0, 0, chunk]) for _ in range(2)]
    return _make(
        draw,
        "pages",
        chunk,
        Side(chunk + gaps[0]),
        Side(chunk + gaps[1]),
        (Axis(), Axis()),
        (chunk + gaps[0], chunk + gaps[1]),
    )


def other_order(draw: Random) -> Job:
    """Heads before tokens at one side, tokens before heads at the other: NHD to HND, or back."""
    chunk = draw.choice([16, 24, 64, 128, 256, 512, 576, 1024, 2048])
    heads, tokens = draw.choice([1, 2, 8]), draw.choice([4, 16])
    by_head, by_token = (tokens * chunk, chunk), (chunk, heads * chunk)  # (head stride, token stride)
    src, dst = draw.choice([(by_head, by_token), (by_token, by_head)])
    block = heads * tokens * chunk
    axes = (Axis(heads, src[0], dst[0]), Axis(tokens, src[1], dst[1]))
    return _make(draw, "NHD/HND", chunk, Side(block), Side(block), axes, (block, block))


def some_heads(draw: Random) -> Job:
    """A rank takes its heads out of all of another's, or gives them: a split of tensor parallelism."""
    content = draw.choice([64, 128, 256])
    heads, ranks, tokens = draw.choice([4, 8]), draw.choice([2, 4]), draw.choice([4, 16])
    mine = heads // ranks
    chunk = mine * content
    large, small = heads * content, mine * content
    offset = draw.randrange(ranks) * chunk
    into = draw.random() < 0.5
    strides = (small, large) if into else (large, small)
    job = _make(
        draw,
        "shard",
        chunk,
        Side(strides[0] * tokens),
        Side(strides[1] * tokens),
        (Axis(), Axis(tokens, *strides)),
        (strides[0] * tokens, strides[1] * tokens),
    )
    moved = [(src, dst + offset) if into else (src + offset, dst) for src, dst in job.lanes]
    return Job(**{**job.__dict__, "lanes": tuple(moved)})


def other_size(draw: Random) -> Job:
    """Blocks of another number of tokens: several of one side fill one of the other, heads outermost."""
    content = draw.choice([32, 96, 128, 256])
    heads, tokens, parts = draw.choice([1, 2, 4]), draw.choice([8, 16]), draw.choice([2, 4])
    piece = tokens * content
    small = Side(heads * piece)
    large = Side(heads * piece * parts, parts, piece)
    strides = (piece, piece * parts)
    blocks = (small.page_stride, large.page_stride)
    if draw.random() < 0.5:
        return _make(draw, "block size", piece, small, large, (Axis(), Axis(heads, *strides)), blocks)
    return _make(draw, "block size", piece, large, small, (Axis(), Axis(heads, *strides[::-1])), blocks[::-1])


GENERATORS: tuple[Callable[[Random], Job], ...] = (whole_pages, whole_pages, other_order, some_heads, other_size)


def _blocks(chunk: int, count: int) -> Job:
    """Blocks of one size, in one plane, that change their order."""
    side, ids = Side(chunk), tuple(range(count))
    nbytes = chunk * count
    return Job("blocks", chunk, side, side, Axis(), Axis(), ((0, 0),), count, ids, ids[::-1], nbytes, nbytes)


# For a tool that watches shared memory: little work, yet more than one round of a thread block, and of its stages.
RACES = {"vectors": _blocks(256, 64), "bulk": _blocks(64 << 10, 8)}
