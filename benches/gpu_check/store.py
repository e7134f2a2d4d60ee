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
        nbytes: How many bytes it has.
    """

    def __init__(self, arena: Arena, kind: str, nbytes: int, device: int = 0) -> None:
        """Allocates."""
        self.kind, self.nbytes, self._arena = kind, nbytes, arena
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

    def put(self, content: Any) -> None:
        """Fills all of it with flat bytes."""
        if self._buffer is not None:
            self._arena.write(self._buffer, content)
        else:
            self._array[:] = self._arena.array(content)

    def get(self) -> Bytes:
        """Reads all of it back."""
        if self._buffer is not None:
            array: Bytes = self._arena.array(self._arena.read(self._buffer))
            return array
        return self._array.copy()

    def wrong(self, expected: Any) -> int:
        """Counts the bytes that differ from flat ones."""
        if self._buffer is not None:
            return self._arena.wrong(self._buffer, expected)
        return int((self._arena.flat(self._array) != expected).sum())

    def tensors(self, geometry: Geometry) -> dict[str, Any]:
        """Gives the per-layer views of a cache that fills it."""
        if self._buffer is not None:
            return geometry.tensors(self._arena, self._buffer)
        view = geometry.array_view(self._array)
        return {f"layers.{layer}": view[layer] for layer in range(geometry.layers)}
