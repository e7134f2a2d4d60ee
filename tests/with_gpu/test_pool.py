"""Pools on a GPU, and what they lend to other libraries."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref

import numpy as np
import pytest

import pdkv
from with_gpu.tensors import on_gpu


def test_a_pool_says_where_it_is(arena):
    pool = on_gpu(4096, 1)
    assert (pool.device, pool.nbytes, len(pool)) == (1, 4096, 4096)
    assert "cuda:1" in repr(pool)
    assert pdkv.Engine.allocate(64).device is None
    assert pdkv.Engine.allocate(64, device="cpu").device is None
    assert pdkv.Engine.allocate(64, device="cuda").device == 0


def test_a_device_is_named_by_whatever_prints_as_one():
    class Device:
        def __str__(self):
            return "cuda:1"

    assert pdkv.Engine.allocate(64, device=Device()).device == 1


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "cuda:-1", "xpu", "cpu:1", "", 5, "cuda:99999999999"])
def test_what_names_no_device_is_refused(name):
    with pytest.raises(pdkv.ConfigError, match="device") as caught:
        pdkv.Engine.allocate(64, device=name)
    assert "cuda:0" in caught.value.hint


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(pdkv.DeviceError, match="101"):
        on_gpu(64, 17)


def test_fresh_memory_shows_nobodys_bytes(arena):
    from gpu_check.dry_arena import DryBuffer

    assert not arena.read(DryBuffer(on_gpu(5000))).any()


def test_the_cuda_array_interface():
    pool = on_gpu(300)
    assert pool.__cuda_array_interface__ == {
        "shape": (300,),
        "typestr": "|u1",
        "data": (pool.address, False),
        "strides": None,
        "stream": None,
        "version": 3,
    }
    with pytest.raises(BufferError, match="as_tensor"):
        memoryview(pool)


def test_host_memory_has_no_cuda_array_interface():
    pool = pdkv.Engine.allocate(300)
    assert not hasattr(pool, "__cuda_array_interface__")
    assert memoryview(pool).nbytes == 300


def test_host_memory_by_dlpack_is_the_same_bytes():
    pool = pdkv.Engine.allocate(300)
    array = np.from_dlpack(pool)
    np.frombuffer(pool, np.uint8)[:] = np.arange(300) % 251
    assert (array == np.arange(300) % 251).all()
    assert array.ctypes.data == pool.address
    alive = weakref.ref(pool)
    del pool
    gc.collect()
    assert alive() is None
    assert array[250] == 250, "the array keeps the memory, not the object"


def capsule_name(capsule):
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return name(capsule)


def test_dlpack_of_a_gpu():
    from pdkv import _core

    pool = on_gpu(300, 1)
    assert pool.__dlpack_device__() == (2, 1)
    old, new = pool.__dlpack__(stream=1), pool.__dlpack__(stream=-1, max_version=(1, 1), dl_device=(2, 1), copy=False)
    assert (capsule_name(old), capsule_name(new)) == (b"dltensor", b"dltensor_versioned")
    for capsule in (old, new):
        assert _core.dlpack_facts(capsule) == (pool.address, [300], [1], 1, "uint8", False)


def laid():
    """How many stretches of memory the stand-in has mapped."""
    standin = ctypes.CDLL(os.environ["PDKV_CUDA_LIBRARY"])
    standin.standin_report.restype = ctypes.c_char_p
    lines = (line.partition("=") for line in standin.standin_report().decode().splitlines())
    return int({name: count for name, _, count in lines}["laid"])


def test_capsules_that_nobody_takes_let_go():
    pool = on_gpu(300)
    with_it = laid()
    capsules = [pool.__dlpack__(max_version=version) for version in (None, (1, 0)) for _ in range(100)]
    del pool
    gc.collect()
    assert laid() == with_it
    del capsules[1:]
    gc.collect()
    assert laid() == with_it, "one is enough to keep the memory"
    capsules.clear()
    gc.collect()
    assert laid() == with_it - 1


@pytest.mark.parametrize("options", [{"dl_device": (1, 0)}, {"dl_device": (2, 1)}, {"copy": True}])
def test_dlpack_elsewhere_or_as_a_copy_is_refused(options):
    with pytest.raises(BufferError):
        on_gpu(64).__dlpack__(**options)


@pytest.mark.parametrize("stream", [0, -2, "x"])
def test_streams_that_the_standard_forbids_are_refused(stream):
    with pytest.raises(pdkv.ConfigError, match="stream"):
        on_gpu(64).__dlpack__(stream=stream)
    with pytest.raises(pdkv.ConfigError, match="stream"):
        pdkv.Engine.allocate(64).__dlpack__(stream=1)
