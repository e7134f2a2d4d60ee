"""How far a device is that works behind its LLM engine's back, such as a GPU: which steps' writes are in its memory.

An LLM engine hands its device a step and goes on; what the step writes is there when the device has come so far. A mark
between two steps tells, and asking it never waits. Knows no CUDA: whoever has a device makes the marks.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

__all__ = ["Device", "Mark", "Steps"]

# Marks of so many steps are kept. What is older than those of a pipeline's steps is long over.
KEPT = 16


class Mark(Protocol):
    """A place in what a device was given, as `torch.cuda.Event` is."""

    def query(self) -> bool:
        """Whether the device has come so far. Never waits."""


class Device(Protocol):
    """The device of one rank."""

    @property
    def stream(self) -> object:
        """What the last step was put on, as `stream=` of `pdkv.KvCache.pull` takes it. Any thread may ask."""

    def mark(self) -> Mark:
        """Marks the place behind everything that the device was given so far. Takes microseconds.

        A mark may be used again once as many others were made as are kept of them, `KEPT`, and one more.
        """


class Steps:
    """The last steps of one rank.

    Args:
        device: Its device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks = deque[tuple[int, Mark]](maxlen=KEPT)

    def begin(self, number: int) -> None:
        """A step begins, with a number larger than those before: nothing of it was given to the device yet."""
        self._marks.append((number, self._device.mark()))

    def over(self, number: int) -> bool:
        """Whether the device has done all of a step, and so of those before it."""
        return any(later > number and mark.query() for later, mark in self._marks)
