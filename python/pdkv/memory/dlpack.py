"""Memory by DLPack (JAX, cupy, ...): of the host, pinned or not, and of NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

from pdkv import _core
from pdkv.memory.facts import CPU, MemoryFacts, contiguous, elsewhere

__all__ = ["from_dlpack"]

_CPU, _CUDA, _CUDA_HOST, _ROCM_HOST = 1, 2, 3, 11
_PINNED = (_CUDA_HOST, _ROCM_HOST)
_NAMES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed", 14: "oneAPI"}
_HINTS = {
    10: "pdkv drives NVIDIA GPUs only: copy to the CPU",
    13: "the driver moves managed memory at will, so no peer can map it: allocate with cudaMalloc, as torch does",
}
_VERSION = (1, 1)


def from_dlpack(tensor: Any) -> MemoryFacts:
    """Reads a capsule of `tensor.__dlpack__`, which stays whole and is kept.

    Of memory on a GPU the capsule is asked for with a stream of pdkv's own: its owner then makes that stream wait for
    what it has under way, as the array API standard says, and the native side waits for the stream.

    Raises:
        UnsupportedError: The memory is on a device that pdkv does not reach, or there is no CUDA driver.
    """
    kind, index = tensor.__dlpack_device__()
    kind = int(kind)
    stream = None
    if kind == _CUDA:
        stream = _core.arrival_stream(int(index))
    elif kind not in (_CPU, *_PINNED):
        name = _NAMES.get(kind, f"DLPack device {kind}")
        raise elsewhere(name, type(tensor).__name__, _HINTS.get(kind))
    capsule = _capsule(tensor, {} if stream is None else {"stream": stream})
    address, shape, strides, itemsize, dtype, readonly = _core.dlpack_facts(capsule)
    return MemoryFacts(
        address=address,
        shape=tuple(shape),
        strides=contiguous(tuple(shape), itemsize) if strides is None else tuple(strides),
        itemsize=itemsize,
        dtype=dtype,
        readonly=readonly,
        pinned=kind in _PINNED,
        # A capsule nobody consumed lets go of the memory when it is collected.
        keep=(tensor, capsule),
        device=CPU if stream is None else f"cuda:{int(index)}",
        stream=stream,
    )


def _capsule(tensor: Any, options: dict[str, Any]) -> Any:
    try:
        return tensor.__dlpack__(max_version=_VERSION, **options)
    except TypeError:  # from before DLPack 1
        return tensor.__dlpack__(**options)
