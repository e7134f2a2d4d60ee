"""Memory of a GPU by torch, which also computes what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from gpu_check.arena import Buffer
from gpu_check.pattern import random_bytes


@dataclass
class TorchBuffer:
    """A torch tensor of bytes on a GPU."""

    owner: Any

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(self.owner.data_ptr())

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return int(self.owner.numel())


class TorchArena:
    """As `Arena` says."""

    name = "torch"
    dry = False

    def __init__(self) -> None:
        """Imports torch and starts CUDA in it."""
        import torch

        if not torch.cuda.is_available():
            raise ImportError(f"torch {torch.__version__} finds no GPU")
        self._torch = torch
        torch.cuda.init()

    def devices(self) -> int:
        """Asks torch."""
        return int(self._torch.cuda.device_count())

    def empty(self, nbytes: int, device: int = 0) -> TorchBuffer:
        """Allocates by torch's allocator, as LLM engines do."""
        return TorchBuffer(self._torch.zeros(nbytes, dtype=self._torch.uint8, device=f"cuda:{device}"))

    def random(self, nbytes: int, seed: int) -> Any:
        """Draws bytes on the CPU, where they are the same in every release, and moves them."""
        return self.flat(random_bytes(nbytes, seed))

    def flat(self, array: Any) -> Any:
        """Moves to the first GPU."""
        return self._torch.from_numpy(array).to("cuda:0")

    def array(self, flat: Any) -> Any:
        """Moves to the CPU."""
        return flat.cpu().numpy()

    def write(self, buffer: Buffer, flat: Any) -> None:
        """Copies."""
        buffer.owner.copy_(flat)
        self._torch.cuda.synchronize()

    def read(self, buffer: Buffer) -> Any:
        """Copies."""
        self._torch.cuda.synchronize()
        flat = buffer.owner.clone().to("cuda:0")
        self._torch.cuda.synchronize()
        return flat

    def wrong(self, buffer: Buffer, flat: Any) -> int:
        """Compares on the GPU."""
        return int((self.read(buffer) != flat).sum())

    def going(self) -> AbstractContextManager[None]:
        """Is how a GPU is."""
        return nullcontext()

    def index(self, numbers: Any) -> Any:
        """Makes 64-bit indices on the GPU."""
        return self._torch.as_tensor(numbers, dtype=self._torch.int64, device="cuda:0")

    def shaped(self, flat: Any, sizes: Sequence[int], order: Sequence[int]) -> Any:
        """Views."""
        return flat.view(self._torch.int16).view(*sizes).permute(*order)

    def tensor(self, buffer: Buffer, sizes: Sequence[int], order: Sequence[int], first: int | None = None) -> Any:
        """Views."""
        whole = self.shaped(buffer.owner, sizes, order)
        return whole if first is None else whole[first]
