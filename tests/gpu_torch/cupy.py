"""As much of cupy as gpu-check uses: arrays over memory of a GPU, by the array interface and by DLPack."""

from __future__ import annotations

import torch

__version__ = "in name, over torch"


class _Array:
    def __init__(self, tensor):
        self._tensor = tensor

    def __setitem__(self, where, value):
        self._tensor[where] = value

    def sum(self):
        return self._tensor.sum()


def full(count, value, dtype):
    """Bytes on the GPU."""
    assert dtype == "u1"
    return _Array(torch.zeros(count, dtype=torch.uint8, device="cuda:0").fill_(value))


def asarray(owner):
    """By the array interface."""
    return _Array(torch.as_tensor(owner, device="cuda:0"))


def from_dlpack(owner):
    """By DLPack."""
    return _Array(torch.from_dlpack(owner))
