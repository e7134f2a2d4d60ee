"""Memory of the stand-in for the driver, as torch's allocator takes it.

Small tensors share segments; with expandable segments all lie in reservations; what nobody has any more is taken again.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref

_SMALL, _SEGMENT, _LARGE_SEGMENT, GRAIN = 1 << 20, 2 << 20, 20 << 20, 512


class Driver:
    """The stand-in, through whose calls torch would go."""

    def __init__(self):
        self._library = ctypes.CDLL(os.environ["PDKV_CUDA_LIBRARY"])
        self._library.standin_segments.restype = ctypes.c_uint64
        self.ask("cuInit", 0)
        self._context = ctypes.c_void_p()
        self.ask("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)

    def ask(self, call, *arguments):
        status = getattr(self._library, call)(*arguments)
        if status:
            raise RuntimeError(f"CUDA error: {call} returned {status}")

    def inside(self, call, *arguments):
        """In the context, which this thread then leaves again."""
        left = ctypes.c_void_p()
        self.ask("cuCtxPushCurrent_v2", self._context)
        try:
            self.ask(call, *arguments)
        finally:
            self.ask("cuCtxPopCurrent_v2", ctypes.byref(left))

    def allocate(self, nbytes):
        address = ctypes.c_uint64()
        self.inside("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def segments(self, count, granules):
        address = self._library.standin_segments(0, count, granules, 1)
        if not address:
            raise RuntimeError("CUDA error: no segments")
        return address

    def pinned(self, nbytes):
        start = ctypes.c_void_p()
        self.inside("cuMemHostAlloc", ctypes.byref(start), ctypes.c_size_t(nbytes), 0)
        return start.value

    def copy(self, dst, src, nbytes, stream):
        sizes = ctypes.c_uint64(dst), ctypes.c_uint64(src), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
        self.inside("cuMemcpyAsync", *sizes)

    def stream(self):
        handle = ctypes.c_void_p()
        self.inside("cuStreamCreateWithPriority", ctypes.byref(handle), 1, 0)
        return handle.value

    def after(self, stream, other):
        """Makes a stream wait for all that another was asked so far."""
        event = ctypes.c_void_p()
        self.inside("cuEventCreate", ctypes.byref(event), 2)
        self.inside("cuEventRecord", event, ctypes.c_void_p(other))
        self.inside("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)
        self.inside("cuEventDestroy_v2", event)

    def capture(self, stream, *, on):
        self.ask("standin_capture", ctypes.c_uint64(stream), int(on))


class Allocator:
    """Memory in segments that tensors share, and that is taken again."""

    def __init__(self, driver):
        self._driver, self._lock = driver, threading.Lock()
        self._free: dict[int, list[int]] = {}
        self._room: dict[bool, list[int]] = {True: [0, 0], False: [0, 0]}

    def take(self, nbytes):
        """An array of bytes on the GPU; what it held goes back when nobody has it any more."""
        size = -(-max(nbytes, 1) // GRAIN) * GRAIN
        with self._lock:
            free = self._free.setdefault(size, [])
            address = free.pop() if free else self._new(size)
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(array, free.append, address)
        return array

    def _new(self, size):
        if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            unit = _SEGMENT if size <= _SMALL else _LARGE_SEGMENT
            return self._driver.segments(-(-size // unit), unit >> 21)
        if size > _LARGE_SEGMENT // 2:
            return self._driver.allocate(-(-size // _SEGMENT) * _SEGMENT)
        room = self._room[size <= _SMALL]
        if room[1] - room[0] < size:
            segment = _SEGMENT if size <= _SMALL else _LARGE_SEGMENT
            room[0] = self._driver.allocate(segment)
            room[1] = room[0] + segment
        room[0] += size
        return room[0] - size
