"""Random work for the kernels: what it says of bytes, and the checksum, against plain loops."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from gpu_check import caches, jobs
from gpu_check.dry_arena import DryArena
from gpu_check.pattern import page_sum, random_bytes, weights


@pytest.mark.parametrize("make", jobs.GENERATORS[1:])
def test_jobs_stay_in_their_memory_and_write_no_byte_twice(make):
    for seed in range(30):
        job = make(Random(seed))
        src, dst = job.places(0), job.places(1)
        assert len(src) == len(dst) == len(job.lanes) * job.num_pages * job.page_bytes
        assert 0 <= src.min() <= src.max() < job.src_bytes
        assert 0 <= dst.min() <= dst.max() < job.dst_bytes
        written = np.zeros(job.dst_bytes, bool)
        written[dst] = True
        assert np.count_nonzero(written) == len(dst)


def test_a_job_by_plain_loops():
    job = jobs.Job(
        kind="by hand",
        chunk_bytes=2,
        src=jobs.Side(24, parts=2, part_stride=4),
        dst=jobs.Side(12),
        outer=jobs.Axis(2, 8, 6),
        inner=jobs.Axis(2, 2, 3),
        lanes=((0, 0), (100, 50)),
        num_pages=3,
        src_pages=(2, 0),
        dst_pages=None,
        src_bytes=200,
        dst_bytes=100,
    )
    expected = []
    for lane in (0, 100):
        for page in range(3):
            entry = (2, 0)[page // 2] * 24 + page % 2 * 4
            expected += [lane + entry + o * 8 + i * 2 + byte for o in range(2) for i in range(2) for byte in range(2)]
    assert job.places(0).tolist() == expected
    assert job.places(1)[:8].tolist() == [0, 1, 3, 4, 6, 7, 9, 10]


def test_work_of_every_alignment_is_drawn():
    widths: Counter[int] = Counter()
    for seed in range(200):
        job = jobs.GENERATORS[seed % len(jobs.GENERATORS)](Random(seed))
        every = [
            16,
            job.chunk_bytes,
            job.src.page_stride,
            job.dst.page_stride,
            *(at for lane in job.lanes for at in lane),
        ]
        bits = int(np.bitwise_or.reduce(every))
        widths[bits & -bits] += 1
    assert set(widths) == {1, 2, 4, 8, 16}, widths


def test_the_checksum_is_the_kernels():
    # The value that rust/pdkv-device/src/kernels/checksum.rs fixes.
    page = np.arange(48, dtype=np.uint8)
    places = np.arange(48, dtype=np.uint64)
    assert page_sum(places, page) == 0xEAF6_6947_FE00_A5B0
    order = np.random.default_rng(1).permutation(48)
    assert page_sum(places[order], page[order]) == page_sum(places, page)
    assert (weights(places) % np.uint64(2) == 1).all()


def test_bytes_follow_from_the_seed():
    assert (random_bytes(100, 7) == random_bytes(200, 7)[:100]).all()
    assert (random_bytes(1000, 7) != random_bytes(1000, 8)).mean() > 0.9
    assert len(np.unique(random_bytes(4096, 1))) == 256


@pytest.mark.parametrize("seed", range(20))
def test_moved_blocks_by_plain_loops(seed):
    draw = Random(seed)
    src, dst = caches.pair(draw)
    here, there = caches.tables(draw, src, dst)
    content, before = random_bytes(src.nbytes, 1), random_bytes(dst.nbytes, 2)
    expected = caches.moved(DryArena(), src, content, here, dst, before, there)
    views = {"src": src.array_view(content), "dst": dst.array_view(expected), "old": dst.array_view(before)}
    assert views["src"].shape == (src.layers, src.blocks, src.heads, src.tokens, src.content)
    for layer in range(src.layers):
        for one, other in zip(here, there, strict=True):
            assert (views["dst"][layer, other] == views["src"][layer, one]).all()
        for other in set(range(dst.blocks)) - set(there):
            assert (views["dst"][layer, other] == views["old"][layer, other]).all()


def test_large_caches_fill_several_segments_of_torchs_allocator():
    first, second = caches.large_pair()
    assert first.nbytes == second.nbytes > 3 * 20 << 20
    assert first.order != second.order
