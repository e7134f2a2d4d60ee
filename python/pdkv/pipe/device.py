"""Tensors that are not in host memory: they pass through pinned buffers, of which there is a bounded pool.

The bytes of a device tensor are copied to a pinned buffer before they are sent, and after they were received from where
they landed to the device. Knows nothing of pipes; asks torch for the copies.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

from pdkv.errors import UnsupportedError

__all__ = ["PinnedPool", "Places"]

# Buffers have a size of these powers and the halves between them, so that a few fit all layers of a model.
_SMALLEST_BYTES = 1 << 16


class Places:
    """Where tensors come from and where they land.

    Args:
        device: `"cpu"` or a torch device.
        limit_bytes: Of pinned buffers; a larger tensor has one alone.
        make: Makes a tensor of a dtype's name, a shape, and received bytes.
    """

    def __init__(self, device: str, limit_bytes: int, make: Callable[[str, tuple[int, ...], Any], Any]) -> None:
        self.device = device
        self._make = make
        self._pool = PinnedPool(limit_bytes)
        self._target: Any = None
        if device != "cpu":
            self._target = _torch_device(device)

    def fetch(self, tensor: Any) -> Any:
        """A tensor in host memory: this one, or a pinned copy of it.

        Blocks until the copy is made, in the order of the current stream of the device; and while the pool has no room.
        """
        if getattr(tensor, "is_cpu", True) or getattr(tensor, "is_meta", False):
            return tensor
        return self._pool.copy_of(tensor)

    def land(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> Any:
        """The tensor that was received, on the device. Blocks until it is there."""
        tensor = self._make(dtype, shape, buffer)
        if self._target is None:
            return tensor
        # Synchronous: the landing memory is given back when this returns.
        return tensor.to(self._target)


class PinnedPool:
    """Pinned host buffers, kept and used again.

    Args:
        limit_bytes: That may be lent at a time; who wants more waits for what is given back.
        pin: Whether the memory is pinned; tests without a device have ordinary memory.
    """

    def __init__(self, limit_bytes: int, *, pin: bool = True) -> None:
        self._limit_bytes, self._pin = limit_bytes, pin
        self._free: dict[int, list[Any]] = {}
        self._lent_bytes = 0
        # Buffers come back from wherever the last reference is dropped, perhaps in a thread that is in here.
        self._room = threading.Condition(threading.RLock())

    def copy_of(self, tensor: Any) -> Any:
        """A contiguous copy of a device's tensor in a buffer, which comes back when the copy is dropped."""
        import torch

        size = tensor.numel() * tensor.element_size()
        whole = self._take(_rounded(size))
        copy = whole[:size].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        return copy

    def _take(self, size: int) -> Any:
        import torch

        with self._room:
            self._room.wait_for(lambda: self._lent_bytes == 0 or self._lent_bytes + size <= self._limit_bytes)
            self._lent_bytes += size
            kept = self._free.get(size)
            storage = kept.pop() if kept else None
        if storage is None:
            storage = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        # An object of its own, which every tensor made of it holds: the buffer comes back when the last is dropped.
        lease = (ctypes.c_uint8 * size).from_address(storage.data_ptr())
        weakref.finalize(lease, self._give_back, storage)
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _give_back(self, storage: Any) -> None:
        with self._room:
            size = storage.numel()
            self._lent_bytes -= size
            self._free.setdefault(size, []).append(storage)
            self._room.notify_all()


def _rounded(size: int) -> int:
    """The size of the buffer for so many bytes: a power of two or one and a half times one."""
    power = max(_SMALLEST_BYTES, 1 << max(0, size - 1).bit_length())
    return power * 3 // 4 if power > _SMALLEST_BYTES and size <= power * 3 // 4 else power


def _torch_device(name: str) -> Any:
    try:
        import torch

        return torch.device(name)
    except (ModuleNotFoundError, RuntimeError) as error:
        raise UnsupportedError(
            f"tensors can't land on `{name}`: {error}", operation="pipe", hint="give `cpu` or a device that torch has"
        ) from error
