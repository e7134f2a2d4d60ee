"""Tensors that are not in host memory: they pass through pinned buffers, of which there is a bounded pool.

The bytes of a device tensor are copied to a pinned buffer before they are sent, and after they were received from where
they landed to the device. Knows nothing of pipes; asks torch for the copies.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from pdkv.errors import TransferTimeoutError, UnsupportedError

__all__ = ["PinnedPool", "Places"]

# Buffers have a size of these powers and the halves between them, so that a few fit all layers of a model.
_SMALLEST_BYTES = 1 << 16
# How often who waits for a buffer looks whether there is any use in it.
_LOOK_S = 0.05


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

    def elsewhere(self, tensor: Any) -> bool:
        """Whether it is a tensor of a device, which has to be fetched first."""
        return not getattr(tensor, "is_cpu", True) and not getattr(tensor, "is_meta", False)

    def fetch(self, tensor: Any, left: Callable[[], float | None], check: Callable[[], None]) -> Any:
        """A copy of a device's tensor in pinned host memory.

        Blocks until the copy is made, in the order of the current stream of the device; and while the pool has no room.

        Args:
            tensor: The device's.
            left: How many seconds may be waited yet, or `None`.
            check: Raises when there is no use in waiting; called now and then.

        Raises:
            TransferTimeoutError: There was no room in time.
        """
        return self._pool.copy_of(tensor, left, check)

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
        limit_bytes: Of all buffers, lent and kept; who wants more waits for what is given back. One tensor that is
            larger than that has a buffer alone.
        pin: Whether the memory is pinned; tests without a device have ordinary memory.
    """

    def __init__(self, limit_bytes: int, *, pin: bool = True) -> None:
        self._limit_bytes, self._pin = limit_bytes, pin
        self._free: deque[Any] = deque()
        self._lent_bytes = self._free_bytes = 0
        # Buffers come back from wherever the last reference is dropped, perhaps in a thread that is in here.
        self._room = threading.Condition(threading.RLock())

    def copy_of(
        self,
        tensor: Any,
        left: Callable[[], float | None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> Any:
        """A contiguous copy of a device's tensor in a buffer, which comes back when the copy is dropped."""
        import torch

        size = tensor.numel() * tensor.element_size()
        whole = self._take(_rounded(size), left, check)
        copy = whole[:size].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        return copy

    def _take(self, size: int, left: Callable[[], float | None], check: Callable[[], None]) -> Any:
        import torch

        with self._room:
            while self._lent_bytes and self._lent_bytes + size > self._limit_bytes:
                wait_s = left()
                if wait_s is not None and not wait_s:
                    text = f"`{size}` bytes of pinned memory were not free in time"
                    raise TransferTimeoutError(text, operation="send_tensor")
                self._room.wait(_LOOK_S if wait_s is None else min(wait_s, _LOOK_S))
                check()
            self._lent_bytes += size
            storage = next((kept for kept in self._free if kept.numel() == size), None)
            if storage is not None:
                # By identity: comparing tensors compares their elements.
                self._free = deque(kept for kept in self._free if kept is not storage)
                self._free_bytes -= size
            while self._free and self._lent_bytes + self._free_bytes > self._limit_bytes:
                self._free_bytes -= self._free.popleft().numel()
        try:
            if storage is None:
                storage = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
            # An object of its own, which every tensor made of it holds: the buffer comes back when the last is dropped.
            lease = (ctypes.c_uint8 * size).from_address(storage.data_ptr())
        except BaseException:
            self._give_back(None, size)
            raise
        weakref.finalize(lease, self._give_back, storage, size)
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _give_back(self, storage: Any | None, size: int) -> None:
        with self._room:
            self._lent_bytes -= size
            if storage is not None and self._lent_bytes + self._free_bytes + size <= self._limit_bytes:
                self._free.append(storage)
                self._free_bytes += size
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
