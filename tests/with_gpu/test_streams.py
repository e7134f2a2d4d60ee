"""`stream=`: what a stream is, and what waits for it; with slow streams, by the checks of `gpu_check.streams`."""

from __future__ import annotations

import ctypes
import os
import types

import numpy as np
import pytest
from gpu_check import streams as checks

import pdkv
from pdkv._core import CudaLoop
from with_gpu.tensors import Cupy, on_gpu


@pytest.fixture
def slow(arena):
    """Two engines with buffers, and a stream that is slow."""
    pair = checks.Pair(arena)
    yield pair, checks.DryWork()
    pair.close()


@pytest.mark.parametrize("name", checks.CHECKS)
def test_a_transfer_waits_for_the_stream_that_it_is_told(slow, name):
    assert checks.CHECKS[name](*slow) == 0


def test_without_a_stream_a_transfer_overtakes(slow):
    assert checks._export(*slow, told=False) > 0, "then the other tests show nothing"


def objects(handle):
    """The same stream as each library has it."""
    return {
        "number": handle,
        "torch": types.SimpleNamespace(cuda_stream=handle, device_index=0),
        "cuda.core": types.SimpleNamespace(__cuda_stream__=lambda: (0, handle)),
        "cuda.core of old": types.SimpleNamespace(__cuda_stream__=(0, handle)),
        "cupy": types.SimpleNamespace(ptr=handle, device_id=0),
    }


@pytest.mark.parametrize("library", objects(1))
def test_streams_of_every_library(slow, library):
    pair, work = slow
    work.stream = objects(work.stream)[library]
    assert checks._export(pair, work) == 0


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_streams(pair, handle):
    cache = pair[0].register_kv_cache({"layers.0": _raw(on_gpu(4096))}, layout="BC", block_tokens=16)
    cache.export([0, 1], stream=handle).release()


NO_STREAMS = [
    "stream",
    -1,
    1.5,
    object(),
    types.SimpleNamespace(cuda_stream="x"),
    1 << 64,
    True,
    False,
    types.SimpleNamespace(cuda_stream=True),
    types.SimpleNamespace(__cuda_stream__=lambda: (0, True)),
]


@pytest.mark.parametrize("thing", NO_STREAMS)
def test_what_is_no_stream_is_refused(pair, thing):
    cache = pair[0].register_kv_cache({"layers.0": _raw(on_gpu(4096))}, layout="BC", block_tokens=16)
    with pytest.raises(pdkv.ConfigError, match="no CUDA stream") as caught:
        cache.export([0], stream=thing)
    assert "cuda_stream" in caught.value.hint


@pytest.fixture
def captured():
    """A stream that captures a graph."""
    standin = ctypes.CDLL(os.environ["PDKV_CUDA_LIBRARY"])
    loop = CudaLoop()
    standin.standin_capture(ctypes.c_void_p(loop.stream), 1)
    yield loop.stream
    standin.standin_capture(ctypes.c_void_p(loop.stream), 0)


def test_a_stream_that_captures_a_graph_is_refused(pair, captured):
    """The event would be the graph's: the transfer would happen at every replay, and not now."""
    pool = on_gpu(4096)
    cache = pair[0].register_kv_cache({"layers.0": _raw(pool)}, layout="BC", block_tokens=16)
    region, target = pair[0].register(pool), pair[1].register(on_gpu(4096))
    peer = pair[1].connect(pair[0].address)
    for call in (
        lambda: cache.export([0], stream=captured),
        lambda: cache.offer([0], stream=captured),
        lambda: peer.read(target, region.describe(), stream=captured),
        lambda: pair[0].register(Cupy(pool, (4096,), "|u1", stream=captured)),
    ):
        with pytest.raises(pdkv.ConfigError, match="captures a CUDA graph") as caught:
            call()
        assert "after it has ended" in caught.value.hint


def test_a_stream_about_host_memory_must_know_its_gpu(pair):
    array = np.zeros((4, 512), np.int16)
    cache = pair[0].register_kv_cache({"layers.0": array}, layout="BC", block_tokens=16)
    loop = CudaLoop(1)
    with pytest.raises(pdkv.ConfigError, match="which GPU"):
        cache.export([0], stream=loop.stream)
    cache.export([0], stream=types.SimpleNamespace(cuda_stream=loop.stream, device_index=1)).release()


def _raw(pool):
    return types.SimpleNamespace(
        pool=pool,
        __cuda_array_interface__={
            "shape": (4, 512),
            "typestr": "<i2",
            "data": (pool.address, False),
            "stream": None,
            "version": 3,
        },
    )
