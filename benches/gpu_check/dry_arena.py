"""Memory of the stand-in for the driver, with numpy to compute what is expected.

The stand-in's memory can't be touched by the processor, like a GPU's: bytes go there and back by the driver's copies.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_check.arena import Buffer
from gpu_check.pattern import random_bytes
from pdkv import Engine, Pool
from pdkv._core import CudaLoop, cuda_count


@dataclass
class DryBuffer:
    """A pool of pdkv on the stand-in."""

    owner: Pool

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.owner.address

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.owner.nbytes


class Strided:
    """A tensor over a pool that speaks the CUDA array interface, with strides as torch's views have them."""

    def __init__(self, pool: Pool, shape: Sequence[int], strides: Sequence[int], offset: int) -> None:
        """Views 16-bit elements from a byte offset on."""
        self.pool = pool
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": "<i2",
            "data": (pool.address + offset, False),
            "stream": None,
            "version": 3,
        }


class DryArena:
    """As `Arena` says."""

    name = "numpy, on the stand-in"
    dry = True

    def __init__(self) -> None:
        """Opens the driver's copies."""
        self._loops: dict[int, CudaLoop] = {}

    def _loop(self, buffer: Buffer) -> CudaLoop:
        device = buffer.owner.device or 0
        return self._loops.setdefault(device, CudaLoop(device))

    def devices(self) -> int:
        """Asks the stand-in."""
        return cuda_count()

    def empty(self, nbytes: int, device: int = 0) -> DryBuffer:
        """Allocates by pdkv: there is no other allocator."""
        buffer = DryBuffer(Engine.allocate(nbytes, device=f"cuda:{device}"))
        self.write(buffer, np.zeros(nbytes, np.uint8))
        return buffer

    def random(self, nbytes: int, seed: int) -> Any:
        """Draws bytes."""
        return random_bytes(nbytes, seed)

    def flat(self, array: Any) -> Any:
        """Is the same here."""
        return array

    def array(self, flat: Any) -> Any:
        """Is the same here."""
        return flat

    def write(self, buffer: Buffer, flat: Any) -> None:
        """Copies by the driver."""
        flat = np.ascontiguousarray(flat)
        loop = self._loop(buffer)
        loop.copy(buffer.address, flat.ctypes.data, flat.nbytes)
        loop.wait()

    def read(self, buffer: Buffer) -> Any:
        """Copies by the driver."""
        flat = np.empty(buffer.nbytes, np.uint8)
        loop = self._loop(buffer)
        loop.copy(flat.ctypes.data, buffer.address, flat.nbytes)
        loop.wait()
        return flat

    def wrong(self, buffer: Buffer, flat: Any) -> int:
        """Compares."""
        return int(np.count_nonzero(self.read(buffer) != flat))

    @contextmanager
    def going(self) -> Iterator[None]:
        """Tells the stand-in to do at once what it is asked."""
        standin = ctypes.CDLL(os.environ["PDKV_CUDA_LIBRARY"])
        standin.standin_eager(1)
        try:
            yield
        finally:
            standin.standin_eager(0)

    def index(self, numbers: Any) -> Any:
        """Makes 64-bit indices."""
        return np.asarray(numbers, np.int64)

    def shaped(self, flat: Any, sizes: Sequence[int], order: Sequence[int]) -> Any:
        """Views."""
        return flat.view(np.int16).reshape(sizes).transpose(order)

    def tensor(self, buffer: Buffer, sizes: Sequence[int], order: Sequence[int], first: int | None = None) -> Any:
        """Views, by an array of the same size that nobody reads."""
        like = self.shaped(np.empty(buffer.nbytes, np.uint8), sizes, order)
        shape, strides = like.shape, like.strides
        if first is None:
            return Strided(buffer.owner, shape, strides, 0)
        return Strided(buffer.owner, shape[1:], strides[1:], first * strides[0])
