"""Tensors of libraries that are not here, over memory of a GPU: each speaks what its library speaks."""

from __future__ import annotations

import sys
import types

import numpy as np

import pdkv
from gpu_torch.gpu_memory import Driver

LEGACY_STREAM = 1
TORCH = "torch"


class Cupy:
    """A cupy array: the CUDA array interface, with the stream that it works on."""

    def __init__(self, pool, shape, typestr="<f2", strides=None, offset=0, stream=None, version=3):
        self.pool = pool
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (pool.address + offset, False),
            "strides": strides,
            "version": version,
        }
        if version > 2:
            self.__cuda_array_interface__["stream"] = stream


class Dlpack:
    """A tensor of a library that speaks DLPack alone, by the capsules of a pool.

    Its owner works on a stream, and makes whichever it is asked with wait for that, as the array API standard says.
    """

    def __init__(self, pool, stream=None):
        self.pool, self.asked, self._stream = pool, [], stream

    def __dlpack_device__(self):
        return self.pool.__dlpack_device__()

    def __dlpack__(self, **options):
        self.asked.append(dict(options))
        taker = options.get("stream", LEGACY_STREAM)
        if self._stream is not None and taker != -1:
            Driver().after(taker, self._stream)
        return self.pool.__dlpack__(**options)


class Jax(Dlpack):
    """A JAX array: DLPack, and a CUDA array interface that is too old to name a stream."""

    def __init__(self, pool):
        super().__init__(pool)
        self.__cuda_array_interface__ = {
            "shape": (pool.nbytes,),
            "typestr": "|u1",
            "data": (pool.address, True),
            "strides": None,
            "version": 2,
        }


class Tensor:
    """A torch tensor on a GPU."""

    layout = "torch.strided"

    def __init__(self, pool, shape, dtype="torch.bfloat16", offset=0):
        self.pool, self.shape, self.dtype, self._offset = pool, shape, dtype, offset
        self.device = types.SimpleNamespace(type="cuda", index=pool.device)
        self._like = np.empty(shape, np.uint16)

    def data_ptr(self):
        return self.pool.address + self._offset

    def stride(self):
        return tuple(step // 2 for step in self._like.strides)

    def element_size(self):
        return 2

    def untyped_storage(self):
        return self.pool


def torch_on(monkeypatch, stream=0):
    """Puts a torch among the loaded modules whose tensors are `Tensor`."""
    current = types.SimpleNamespace(cuda_stream=stream)
    cuda = types.SimpleNamespace(current_stream=lambda device: current, is_initialized=lambda: True)
    module = types.SimpleNamespace(Tensor=Tensor, cuda=cuda, version=types.SimpleNamespace(hip=None))
    monkeypatch.setitem(sys.modules, TORCH, module)
    return current


def on_gpu(nbytes, device=0):
    """Allocates."""
    return pdkv.Engine.allocate(nbytes, device=f"cuda:{device}")
