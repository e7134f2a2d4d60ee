"""Memory of torch tensors, asked of torch itself: bfloat16 and fp8, storages, and streams go through no protocol.

torch is found among the loaded modules and never imported.
"""

from __future__ import annotations

import sys
from typing import Any

from pdkv.errors import LayoutError
from pdkv.memory.cuda import LEGACY_STREAM
from pdkv.memory.facts import CPU, OPERATION, MemoryFacts, elsewhere

__all__ = ["from_torch", "is_torch"]

_CUDA = "cuda"


def is_torch(tensor: Any) -> bool:
    """Whether this is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def from_torch(tensor: Any) -> MemoryFacts:
    """Asks the tensor.

    Raises:
        UnsupportedError: It is on a device that pdkv does not reach.
        LayoutError: It is sparse.
    """
    kind = tensor.device.type
    if kind == _CUDA and getattr(sys.modules["torch"].version, "hip", None):
        raise elsewhere("ROCm", "torch.Tensor", "pdkv drives NVIDIA GPUs only: copy to the CPU")
    if kind not in (CPU, _CUDA):
        raise elsewhere(kind, "torch.Tensor")
    if str(tensor.layout) != "torch.strided":
        raise LayoutError(f"the tensor has the layout `{tensor.layout}`", operation=OPERATION)
    itemsize = tensor.element_size()
    return MemoryFacts(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(step * itemsize for step in tensor.stride()),
        itemsize=itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
        readonly=False,
        pinned=kind == CPU and _is_pinned(tensor),
        # The storage too: `tensor.set_()` would let go of it. With expandable segments it also keeps the pages mapped.
        keep=(tensor, tensor.untyped_storage()),
        device=kind if kind == CPU else f"{_CUDA}:{tensor.device.index}",
        stream=None if kind == CPU else _current_stream(tensor.device),
    )


def _is_pinned(tensor: Any) -> bool:
    # Without an accelerator nothing can be pinned, and asking would make torch start one.
    torch = sys.modules["torch"]
    return bool(torch.cuda.is_initialized() and tensor.is_pinned())


def _current_stream(device: Any) -> int:
    """The stream on which this thread asks torch for things: `torch.zeros` may be under way on it."""
    handle: int = sys.modules["torch"].cuda.current_stream(device).cuda_stream
    return handle or LEGACY_STREAM
