"""Pages in the memory of a GPU: those of `buffers`, with a mirror on the host that is filled and checked instead.

Bytes go between the two by the driver's own copies, all of them each time; no measured time has them in it.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pdkv.bench import pattern
from pdkv.bench.buffers import Pages
from pdkv.bench.cases import Case
from pdkv.bench.tables import Ids

DEVICE = "cuda"


class Strided:
    """A view of a pool on a GPU with the shape and strides of a numpy array, by the CUDA array interface."""

    def __init__(self, pool: Any, like: npt.NDArray[Any], offset: int) -> None:
        """Views from a byte offset on."""
        self.pool = pool
        self.__cuda_array_interface__ = {
            "shape": like.shape,
            "strides": like.strides,
            "typestr": like.dtype.str,
            "data": (pool.address + offset, False),
            "stream": None,
            "version": 3,
        }


class DevicePages(Pages):
    """The pool of one side of a case, on the first GPU."""

    def __init__(self, case: Case, engine: Any, native: Any) -> None:
        """Allocates the pool and its mirror."""
        super().__init__(case, engine, where="private")
        self.where = DEVICE
        self.pool: Any = engine.allocate(case.pool_bytes, device=DEVICE)
        self._loop: Any = native.CudaLoop(self.pool.device)

    @property
    def address(self) -> int:
        """Where the pool starts, on the GPU."""
        return int(self.pool.address)

    @property
    def whole(self) -> Any:
        """What is registered to have all of it."""
        return self.pool

    def tensors(self) -> dict[str, Any]:
        """Gives the views of `Pages`, of the GPU's memory."""
        start = self.bytes.ctypes.data
        return {name: Strided(self.pool, view, view.ctypes.data - start) for name, view in super().tensors().items()}

    def fill(self, ids: Ids, stamp: int, native: pattern.Native | None) -> None:
        """Writes the pattern into the mirror, and the mirror to the GPU."""
        super().fill(ids, stamp, native)
        self._copy(self.address, self.bytes.ctypes.data)

    def find_wrong(self, ids: Ids, origins: Ids, stamp: int, native: pattern.Native | None) -> pattern.Found:
        """Reads the GPU's memory into the mirror, and compares that."""
        self._copy(self.bytes.ctypes.data, self.address)
        return super().find_wrong(ids, origins, stamp, native)

    def _copy(self, dst: int, src: int) -> None:
        self._loop.copy(dst, src, self.case.pool_bytes)
        self._loop.wait()


def make_pages(case: Case, engine: Any, native: Any) -> Pages:
    """Makes the pool of one side, where the case says.

    Raises:
        UnsupportedError: It is to be on a GPU, and there is none.
    """
    return DevicePages(case, engine, native) if case.where == DEVICE else Pages(case, engine)
