"""Finds the memory behind a tensor: address, shape, strides, dtype and device.

Tensors come as torch tensors, by the array interface (numpy, and everything that speaks its protocol), by the CUDA
array interface (cupy, numba), by DLPack (JAX, cupy, ...) or by the buffer protocol (`bytearray`, `mmap`, `pdkv.Pool`).
None of those libraries is imported here. This package moves no bytes, waits for nothing and keeps nothing: whoever
registers memory holds on to `MemoryFacts.keep`, and waits for `MemoryFacts.stream`.
"""

from __future__ import annotations

from typing import Any

from pdkv import _core
from pdkv.memory.cuda import from_cuda_array_interface, lacks_stream
from pdkv.memory.dlpack import from_dlpack
from pdkv.memory.facts import CPU, MemoryFacts
from pdkv.memory.host import from_array_interface, from_buffer
from pdkv.memory.torch_tensor import from_torch, is_torch

__all__ = ["MemoryFacts", "describe"]


def describe(tensor: Any) -> MemoryFacts:
    """Finds the memory behind `tensor`, on the host or on a GPU.

    Args:
        tensor: A torch tensor, a `pdkv.Pool`, or anything with `__cuda_array_interface__`, `__array_interface__`,
            `__dlpack__` or the buffer protocol; the first of these that it has is asked. A CUDA array interface before
            version 3 names no stream, so whoever speaks DLPack too (JAX) is asked for that.

    Returns:
        The facts, with whatever keeps the memory alive.

    Raises:
        UnsupportedError: The memory is on a device that pdkv does not reach, or `tensor` has no memory to speak of.
        RegionError: The object refuses to hand out its memory, or says of it what can't be.
        LayoutError: It is sparse, masked or big-endian.
    """
    if is_torch(tensor):
        return from_torch(tensor)
    if isinstance(tensor, _core.Pool):
        return _from_pool(tensor)
    speaks_dlpack = hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__")
    if hasattr(tensor, "__cuda_array_interface__") and not (speaks_dlpack and lacks_stream(tensor)):
        return from_cuda_array_interface(tensor)
    if hasattr(tensor, "__array_interface__"):
        return from_array_interface(tensor)
    if speaks_dlpack:
        return from_dlpack(tensor)
    return from_buffer(tensor)


def _from_pool(pool: _core.Pool) -> MemoryFacts:
    return MemoryFacts(
        address=pool.address,
        shape=(pool.nbytes,),
        strides=(1,),
        itemsize=1,
        dtype="uint8",
        readonly=False,
        pinned=False,
        keep=pool,
        device=CPU if pool.device is None else f"cuda:{pool.device}",
    )
