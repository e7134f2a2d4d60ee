"""Bytes that both ends of a check can make from a number, and the checksum of the kernels in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_WORD = np.uint64(0xD6E8FEB86659FD93)


def random_bytes(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Makes bytes that follow from the seed: a mix of (seed, place), eight at a time."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    salt = np.uint64(seed * int(_WORD) & 0xFFFFFFFFFFFFFFFF)
    mixed = _mix((words + np.uint64(1)) * _GOLDEN + salt)
    return mixed.view(np.uint8)[:nbytes].copy()


def weights(logical: U64) -> U64:
    """What a byte of a page weighs in its sum, by its logical place: as `cuda/checksum.cuh` says."""
    mixed = _mix((logical // np.uint64(16) + np.uint64(1)) * _GOLDEN)
    weight: U64 = (mixed ^ (logical // np.uint64(4) % np.uint64(4)) * _WORD) | np.uint64(1)
    return weight


def page_sum(logical: U64, content: npt.NDArray[np.uint8]) -> int:
    """The checksum of bytes that lie at these logical places of their page."""
    parts = content.astype(np.uint64) << (logical % np.uint64(4) * np.uint64(8))
    return int((parts * weights(logical)).sum(dtype=np.uint64))


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))
