"""Stands in for a GPU and for what torch says of it: work is put on a stream, and done when it is told to.

The memory is the host's, so that any transport reaches it: what is tried with this is order, not transport.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from connectors.stand_in import Tensor

__all__ = ["Gpu", "GpuTensor"]


class GpuTensor(Tensor):
    """A tensor that says it is on a GPU."""

    device = "cuda:0"


class Gpu:
    """One GPU with one stream.

    Attributes:
        done: How much of what it was given it has done.
        marks: How many marks were put between.
    """

    def __init__(self) -> None:
        self._given: list[Callable[[], None]] = []
        self.done = self.marks = 0

    @property
    def given(self) -> int:
        return len(self._given)

    def give(self, work: Callable[[], None]) -> None:
        """Puts work on its stream."""
        self._given.append(work)

    def work_off(self) -> None:
        """Does everything that it was given."""
        while self.done < len(self._given):
            self._given[self.done]()
            self.done += 1

    @contextmanager
    def torch(self) -> Iterator[None]:
        """Puts a stand-in with this GPU in the place of `torch`."""
        gpu = self

        class Event:
            def record(self, stream: Any) -> None:
                assert stream.cuda_stream == 7
                gpu.marks += 1
                self.place, self.is_new = gpu.given, True

            def query(self) -> bool:
                # An event takes some microseconds to pass, even where there is nothing before it.
                is_new, self.is_new = self.is_new, False
                return gpu.done >= self.place and not is_new

        module: Any = ModuleType("torch")
        # As torch's, it is another one for each thread.
        streams = {threading.get_ident(): SimpleNamespace(cuda_stream=7)}
        other = SimpleNamespace(cuda_stream=0)
        module.cuda = SimpleNamespace(
            Event=Event, current_stream=lambda index: streams.get(threading.get_ident(), other)
        )
        module.version = SimpleNamespace(hip=None)
        module.Tensor = type("Tensor", (), {})  # the memory is none of torch's
        before = sys.modules.get("torch")
        sys.modules["torch"] = module
        try:
            yield
        finally:
            del sys.modules["torch"]
            if before is not None:
                sys.modules["torch"] = before
