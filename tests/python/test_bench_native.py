"""The native helpers of the benchmark: the pattern is the reference's, the limits move what they should."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

import pdkv
from pdkv import _core
from pdkv.bench import pattern

PAGES, POOL = 64, 1 << 20


def pages(page_bytes, seed=1):
    """Shuffled offsets that do not overlap, and a key for each."""
    rng = np.random.default_rng(seed)
    step = -(-page_bytes // 8) * 8
    offsets = (rng.permutation(PAGES) * step).astype(np.uint64)
    numbers = np.arange(PAGES, dtype=np.uint64)
    return offsets, pattern.keys(seed, 2, numbers % np.uint64(3), numbers)


@pytest.mark.parametrize("page_bytes", [1, 8, 100, 4096, 8200, 16384])
@pytest.mark.parametrize("threads", [1, 4])
def test_pattern_is_the_reference_pattern(page_bytes, threads):
    ours, reference = np.zeros(POOL, np.uint8), np.zeros(POOL, np.uint8)
    offsets, keys = pages(page_bytes)
    _core.pattern_fill(ours.ctypes.data, offsets, page_bytes, keys, threads)
    pattern.fill(reference, offsets, page_bytes, keys, None, 1)
    assert (ours == reference).all()
    assert _core.pattern_verify(ours.ctypes.data, offsets, page_bytes, keys, threads) == []


@pytest.mark.parametrize("byte", [0, 4095])
def test_every_wrong_page_is_found(byte):
    memory = np.zeros(POOL, np.uint8)
    offsets, keys = pages(4096)
    _core.pattern_fill(memory.ctypes.data, offsets, 4096, keys, 2)
    for position in (3, 60):
        memory[int(offsets[position]) + byte] ^= 1
    assert _core.pattern_verify(memory.ctypes.data, offsets, 4096, keys, 2) == [3, 60]


def test_bad_lists_are_refused():
    memory = np.zeros(64, np.uint8)
    one, two = np.zeros(1, np.uint64), np.zeros(2, np.uint64)
    with pytest.raises(pdkv.ConfigError):
        _core.pattern_fill(memory.ctypes.data, one, 8, two, 1)
    with pytest.raises(pdkv.ConfigError):
        _core.limit_copy(memory.ctypes.data, memory.ctypes.data, one, two, 8, 1)
    with pytest.raises(pdkv.RegionError):
        _core.pattern_fill(memory.ctypes.data, np.array([2**64 - 4], np.uint64), 8, one, 1)


def test_limit_copy():
    source, target = np.zeros(POOL, np.uint8), np.zeros(POOL, np.uint8)
    offsets, keys = pages(4096)
    to, _ = pages(4096, seed=9)
    _core.pattern_fill(source.ctypes.data, offsets, 4096, keys, 1)
    assert _core.limit_copy(target.ctypes.data, source.ctypes.data, to, offsets, 4096, 2) > 0
    assert _core.pattern_verify(target.ctypes.data, to, 4096, keys, 1) == []


def test_limit_cma_reads_another_process():
    script = """
import sys, numpy as np
a = np.arange(1 << 16, dtype=np.uint32)
print(a.ctypes.data, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as child:
        address = int(child.stdout.readline())
        target = np.zeros(1 << 16, np.uint32)
        offsets = np.arange(0, 1 << 18, 4096, dtype=np.uint64)
        seconds = _core.limit_cma(child.pid, target.ctypes.data, address, offsets, offsets, 4096, 2)
        child.stdin.close()
    assert seconds > 0
    assert (target == np.arange(1 << 16)).all()


def test_limit_cma_of_a_process_that_is_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    target, offsets = np.zeros(8, np.uint8), np.zeros(1, np.uint64)
    with pytest.raises(pdkv.PdkvError):
        _core.limit_cma(child.pid, target.ctypes.data, target.ctypes.data, offsets, offsets, 8, 1)


def test_limit_tcp_sends_and_scatters():
    source, target = np.zeros(POOL, np.uint8), np.zeros(POOL, np.uint8)
    offsets, keys = pages(4096)
    to, _ = pages(4096, seed=9)
    _core.pattern_fill(source.ctypes.data, offsets, 4096, keys, 1)
    pairs = [socket.socketpair() for _ in range(2)]
    sending = threading.Thread(
        target=_core.limit_tcp_send, args=([a.fileno() for a, _ in pairs], source.ctypes.data, offsets, 4096)
    )
    sending.start()
    _core.limit_tcp_recv([b.fileno() for _, b in pairs], target.ctypes.data, to, 4096)
    sending.join()
    for a, b in pairs:
        a.close()
        b.close()
    assert _core.pattern_verify(target.ctypes.data, to, 4096, keys, 1) == []
    for bad in (-1, os.sysconf("SC_OPEN_MAX") + 7):
        with pytest.raises(pdkv.ConfigError, match="file descriptor"):
            _core.limit_tcp_recv([bad], target.ctypes.data, to, 4096)
