"""Memory of any kind at one end of a transfer: of a GPU, of a pool of pdkv's, of the process, or pinned by torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_check.arena import Arena, Buffer
from gpu_check.caches import Geometry
from pdkv import Engine

Bytes = npt.NDArray[np.uint8]
GPU, POOL, PRIVATE, PINNED = "gpu", "pool", "private", "pinned"


class Store:
    """Some memory that can be filled, read back and registered.

    Attributes:
        kind: What memory it is.
        owner: What pdkv registers to have all of it.
    """

    def __init__(self, arena: Arena, kind: str, nbytes: int, device: int = 0) -> None:
        """Allocates."""
        self.kind, self._arena = kind, arena
        self._buffer: Buffer | None = None
        self._array: Bytes = np.empty(0, np.uint8)
        if kind == GPU:
            self._buffer = arena.empty(nbytes, device)
            self.owner: Any = self._buffer.owner
            return
        if kind == POOL:
            self.owner = Engine.allocate(nbytes, huge_pages=False)
            self._array = np.frombuffer(self.owner, np.uint8)
        elif kind == PINNED:
            import torch

            self.owner = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
            self._array = self.owner.numpy()
        else:
            self.owner = self._array = np.zeros(nbytes, np.uint8)

    def put(self, content: Bytes) -> None:
        """Fills all of it."""
        if self._buffer is not None:
            self._arena.write(self._buffer, self._arena.flat(content))
        else:
            self._array[:] = content

    def get(self) -> Bytes:
        """Reads all of it back."""
        if self._buffer is not None:
            array: Bytes = self._arena.array(self._arena.read(self._buffer))
            return array
        return self._array.copy()

    def tensors(self, geometry: Geometry) -> dict[str, Any]:
        """Gives the per-layer views of a cache that fills it."""
        if self._buffer is not None:
            return geometry.tensors(self._arena, self._buffer)
        view = geometry.array_view(self._array)
        return {f"layers.{layer}": view[layer] for layer in range(geometry.layers)}
