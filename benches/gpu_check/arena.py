"""Memory of a GPU as the steps see it: filled, read back, shaped and compared, by torch or by numpy.

`flat` is what a step computes with: a torch tensor on the GPU or a numpy array, of bytes, with the same operators.
What is expected of pdkv on a GPU is computed by torch, which knows nothing of pdkv; the checksums of kernels are not,
which numpy adds up (pattern.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

DRY = "GPU_CHECK_DRY"


class Buffer(Protocol):
    """Bytes on a GPU."""

    @property
    def address(self) -> int:
        """Where they begin."""

    @property
    def nbytes(self) -> int:
        """How many."""

    @property
    def owner(self) -> Any:
        """What pdkv registers to have all of them."""


class Arena(Protocol):
    """Where buffers come from.

    Attributes:
        name: What computes the expected bytes.
        dry: Whether the driver is the stand-in.
    """

    name: str
    dry: bool

    def devices(self) -> int:
        """Counts the GPUs."""

    def empty(self, nbytes: int, device: int = 0) -> Buffer:
        """Allocates, zeroed."""

    def random(self, nbytes: int, seed: int) -> Any:
        """Makes flat bytes that follow from the seed."""

    def flat(self, array: Any) -> Any:
        """Makes flat bytes of a numpy array."""

    def array(self, flat: Any) -> Any:
        """Makes a numpy array of flat bytes."""

    def write(self, buffer: Buffer, flat: Any) -> None:
        """Copies flat bytes to a buffer, and waits."""

    def read(self, buffer: Buffer) -> Any:
        """Copies a buffer's bytes, and waits."""

    def wrong(self, buffer: Buffer, flat: Any) -> int:
        """Counts the bytes that differ from the expected ones."""

    def going(self) -> AbstractContextManager[None]:
        """While this lasts the GPU goes on though nobody asks after it."""

    def index(self, numbers: Any) -> Any:
        """Makes an index for flat bytes, and for views of them, of whole numbers."""

    def shaped(self, flat: Any, sizes: Sequence[int], order: Sequence[int]) -> Any:
        """Views flat bytes as 16-bit elements of these sizes, the axes then put in this order."""

    def tensor(self, buffer: Buffer, sizes: Sequence[int], order: Sequence[int], first: int | None = None) -> Any:
        """Views a buffer the same way, at one index of the first axis after that; as what pdkv registers."""


def is_dry() -> bool:
    """Whether this run is on the stand-in."""
    return os.environ.get(DRY) == "1"


def open_arena() -> Arena:
    """Opens torch, or in a dry run numpy over the stand-in.

    Raises:
        ImportError: There is no torch.
    """
    if is_dry():
        from gpu_check.dry_arena import DryArena

        return DryArena()
    from gpu_check.torch_arena import TorchArena

    return TorchArena()
