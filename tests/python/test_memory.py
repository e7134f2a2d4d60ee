"""Finding the memory behind a tensor, whichever way it is offered."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import types
from contextlib import suppress

import numpy as np
import pytest

import pdkv
from pdkv.memory import describe


def test_numpy_gives_address_shape_strides_and_dtype():
    array = np.zeros((4, 6, 8), np.float16)[1:, ::2]
    facts = describe(array)
    assert facts.address == array.ctypes.data
    assert (facts.shape, facts.strides) == (array.shape, array.strides)
    assert (facts.itemsize, facts.dtype, facts.readonly) == (2, "float16", False)
    assert facts.keep is array


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_numpy_integers(name):
    assert describe(np.zeros(4, name)).dtype == name


@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "float32"), (np.float64, "float64"), (np.bool_, "bool")])
def test_numpy_others(dtype, name):
    assert describe(np.zeros(4, dtype)).dtype == name


def test_numpy_read_only_is_noticed():
    array = np.zeros(4)
    array.flags.writeable = False
    assert describe(array).readonly
    assert describe(b"bytes").readonly


def test_big_endian_is_refused():
    with pytest.raises(pdkv.LayoutError, match="big-endian"):
        describe(np.zeros(4, ">f4"))


def test_void_is_raw_bytes():
    assert describe(np.zeros(4, "V16")).dtype == "raw"


class Interface:
    """An array interface of somebody who is not numpy."""

    def __init__(self, array, **changes):
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, **changes}


def test_types_that_numpy_does_not_know_are_read_by_name():
    # ml_dtypes' bfloat16 calls itself void of two bytes.
    array = Interface(np.zeros((2, 3), np.uint16), typestr="<V2")
    array.dtype = types.SimpleNamespace(name="bfloat16")
    facts = describe(array)
    assert (facts.dtype, facts.itemsize, facts.strides) == ("bfloat16", 2, (6, 2))


@pytest.mark.parametrize("make", [bytearray, lambda n: mmap.mmap(-1, n), lambda n: memoryview(bytearray(n))])
def test_buffers(make):
    buffer = make(4096)
    facts = describe(buffer)
    assert facts.address == np.frombuffer(buffer, np.uint8).ctypes.data
    assert (facts.shape, facts.strides, facts.dtype, facts.readonly) == ((4096,), (1,), "uint8", False)


def test_a_buffer_in_use_can_not_be_resized():
    buffer = bytearray(64)
    facts = describe(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    del facts
    buffer.extend(b"more")


class OnlyDlpack:
    """Hides everything of an array but DLPack."""

    def __init__(self, array, device=(1, 0), versioned=True):
        self.array, self.device, self.versioned = array, device, versioned

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if not self.versioned and options:
            raise TypeError("unexpected keyword")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "int64", "uint8", "bool"])
def test_dlpack(versioned, dtype):
    array = np.zeros((3, 5, 4), dtype)[:, 1:3]
    facts = describe(OnlyDlpack(array, versioned=versioned))
    assert facts.address == array.ctypes.data
    assert (facts.shape, facts.strides, facts.dtype) == (array.shape, array.strides, dtype)
    assert not facts.readonly


def test_dlpack_read_only_is_noticed():
    array = np.zeros(8)
    array.flags.writeable = False
    assert describe(OnlyDlpack(array)).readonly


def test_dlpack_capsules_that_are_no_tensors_are_refused():
    from pdkv import _core

    capsule = np.zeros(4).__dlpack__()
    np.from_dlpack(types.SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0)))
    with pytest.raises(pdkv.UnsupportedError, match="consumed"):
        _core.dlpack_facts(capsule)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(10, "NVIDIA GPUs only"), (13, "moves managed memory at will"), (8, "copy to one"), (99, "copy to one")],
)
def test_dlpack_devices_that_are_not_reached_are_refused(kind, why):
    with pytest.raises(pdkv.UnsupportedError) as caught:
        describe(OnlyDlpack(np.zeros(4), device=(kind, 0)))
    assert why in caught.value.hint
    assert "device" in caught.value.context


@pytest.mark.parametrize(("kind", "pinned"), [(1, False), (3, True), (11, True)])
def test_dlpack_host_memory_pinned_or_not_is_asked_for_without_a_stream(kind, pinned):
    asked = []

    class Asked(OnlyDlpack):
        def __dlpack__(self, **options):
            asked.append(options)
            return super().__dlpack__(**options)

    facts = describe(Asked(np.zeros(4), device=(kind, 0)))
    assert (facts.device, facts.stream, facts.pinned) == ("cpu", None, pinned)
    assert asked == [{"max_version": (1, 1)}]


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_of_a_gpu_is_asked_for_with_a_stream_of_ours(versioned, monkeypatch):
    from pdkv import _core

    asked = []

    class Asked(OnlyDlpack):
        def __dlpack__(self, **options):
            asked.append(options)
            if not self.versioned and "max_version" in options:
                raise TypeError("unexpected keyword")
            return self.array.__dlpack__()

    monkeypatch.setattr(_core, "arrival_stream", lambda device: 1000 + device)
    array = np.zeros((3, 4), np.float16)
    facts = describe(Asked(array, device=(2, 5), versioned=versioned))
    assert (facts.device, facts.stream, facts.address) == ("cuda:5", 1005, array.ctypes.data)
    assert asked[-1] == {"stream": 1005} | ({"max_version": (1, 1)} if versioned else {})


class OnGpu:
    """Speaks the CUDA array interface, of memory that nobody looks at."""

    def __init__(self, **changes):
        interface = {"version": 3, "shape": (2, 3, 4), "typestr": "<f2", "data": (0x7F00_0000, False), "stream": None}
        self.__cuda_array_interface__ = {**interface, **changes}


def test_cuda_array_interface():
    facts = describe(tensor := OnGpu())
    assert (facts.address, facts.shape, facts.strides) == (0x7F00_0000, (2, 3, 4), (24, 8, 2))
    assert (facts.itemsize, facts.dtype, facts.readonly, facts.pinned) == (2, "float16", False, False)
    assert (facts.device, facts.stream, facts.keep) == ("cuda", None, tensor)
    facts = describe(OnGpu(strides=(100, 20, 4), data=(64, True)))
    assert (facts.strides, facts.readonly) == ((100, 20, 4), True)
    named = OnGpu(typestr="<V2")
    named.dtype = types.SimpleNamespace(name="bfloat16")
    assert describe(named).dtype == "bfloat16"


@pytest.mark.parametrize("stream", [1, 2, 0x5555_0000])
def test_the_stream_of_a_cuda_array_is_read_from_version_3_on(stream):
    assert describe(OnGpu(stream=stream)).stream == stream
    assert describe(OnGpu(stream=None)).stream is None
    assert describe(OnGpu(stream=stream, version=2)).stream == 1, "the legacy default stream"


@pytest.mark.parametrize(
    ("changes", "error", "part"),
    [
        ({"mask": object()}, pdkv.LayoutError, "masked"),
        ({"version": 1}, pdkv.UnsupportedError, "version `1`"),
        ({"version": 4}, pdkv.UnsupportedError, "version `4`"),
        ({"stream": 0}, pdkv.RegionError, "forbids"),
        ({"stream": -1}, pdkv.RegionError, "its stream is `-1`"),
        ({"stream": True}, pdkv.RegionError, "its stream is `True`"),
        ({"stream": "legacy"}, pdkv.RegionError, "its stream is"),
        ({"typestr": ">f4"}, pdkv.LayoutError, "big-endian"),
        ({"typestr": "f"}, pdkv.RegionError, "what can't be"),
        ({"data": 5}, pdkv.RegionError, "what can't be"),
        ({"shape": None}, pdkv.RegionError, "what can't be"),
    ],
)
def test_a_cuda_array_interface_that_is_not_understood_is_refused(changes, error, part):
    with pytest.raises(error, match=part):
        describe(OnGpu(**changes))


def test_an_empty_cuda_array_interface_is_refused():
    with pytest.raises(pdkv.RegionError, match="version"):
        describe(types.SimpleNamespace(__cuda_array_interface__={}))


@pytest.mark.parametrize("thing", [None, 5, "text", [1, 2], object()])
def test_what_has_no_memory_is_refused(thing):
    with pytest.raises(pdkv.UnsupportedError, match=type(thing).__name__):
        describe(thing)


class FakeTensor:
    """Has of torch.Tensor what `describe` asks of it."""

    def __init__(self, array, dtype, device="cpu", layout="torch.strided"):
        self.array, self.dtype, self.layout = array, dtype, layout
        self.device = types.SimpleNamespace(type=device, index=3)
        self.shape = array.shape

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self):
        return self.array.itemsize

    def untyped_storage(self):
        return self.array

    def is_pinned(self):
        return True


@pytest.fixture
def torch(monkeypatch):
    stream = types.SimpleNamespace(cuda_stream=0)
    cuda = types.SimpleNamespace(is_initialized=lambda: False, current_stream=lambda device: stream)
    module = types.SimpleNamespace(
        Tensor=FakeTensor, cuda=cuda, version=types.SimpleNamespace(hip=None), current=stream
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_torch_is_recognised_without_importing_it(torch, name):
    array = np.zeros((4, 8), np.uint16 if "16" in name else np.uint8)[:, ::2]
    facts = describe(FakeTensor(array, f"torch.{name}"))
    assert (facts.address, facts.shape, facts.strides) == (array.ctypes.data, array.shape, array.strides)
    assert (facts.dtype, facts.pinned) == (name, False)


def test_torch_devices_sparse_and_pinned(torch):
    with pytest.raises(pdkv.UnsupportedError, match="xpu"):
        describe(FakeTensor(np.zeros(4), "torch.float64", device="xpu"))
    with pytest.raises(pdkv.LayoutError, match="sparse"):
        describe(FakeTensor(np.zeros(4), "torch.float64", layout="torch.sparse_coo"))
    torch.cuda.is_initialized = lambda: True
    assert describe(FakeTensor(np.zeros(4), "torch.float64")).pinned


def test_torch_on_a_gpu(torch):
    array = np.zeros((4, 8), np.uint16)[:, ::2]
    facts = describe(tensor := FakeTensor(array, "torch.bfloat16", device="cuda"))
    assert (facts.address, facts.shape, facts.strides) == (array.ctypes.data, array.shape, array.strides)
    assert (facts.device, facts.dtype, facts.pinned) == ("cuda:3", "bfloat16", False)
    assert facts.stream == 1, "torch calls the legacy default stream 0, the driver 1"
    assert facts.keep == (tensor, array), "the storage too"
    torch.current.cuda_stream = 0xABC0
    assert describe(tensor).stream == 0xABC0


def test_torch_on_an_amd_gpu_is_refused(torch):
    torch.version.hip = "6.2"
    with pytest.raises(pdkv.UnsupportedError, match="ROCm"):
        describe(FakeTensor(np.zeros(4), "torch.float64", device="cuda"))


def test_a_pool_is_described_by_itself():
    pool = pdkv.Engine.allocate(4096)
    facts = describe(pool)
    assert (facts.address, facts.shape, facts.strides, facts.itemsize) == (pool.address, (4096,), (1,), 1)
    assert (facts.dtype, facts.device, facts.keep) == ("uint8", "cpu", pool)


ASKED = """
import pdkv

class Tensor:
    __cuda_array_interface__ = {"shape": (64,), "typestr": "|u1", "data": (1 << 46, False), "version": 3}

with pdkv.Engine("a", listen=None) as engine:
    for ask in (lambda: engine.register(Tensor()), lambda: engine.allocate(64, device="cuda:0")):
        try:
            ask()
        except pdkv.UnsupportedError as error:
            print(error)
"""


@pytest.mark.parametrize("library", ["", "/nowhere/libcuda.so.1"])
def test_without_a_driver_memory_of_gpus_is_refused_for_that_reason(library):
    if not library:
        with suppress(OSError):
            ctypes.CDLL("libcuda.so.1")
            pytest.skip("this machine has a CUDA driver")
    environment = {**os.environ, "PDKV_CUDA_LIBRARY": library}
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stderr == ""
    assert done.stdout.count("no CUDA driver") == 2
    assert done.stdout.count("PDKV_CUDA_LIBRARY" if library else "CUDA 12.0 or newer") == 2
