"""Step: tensors of real libraries over pdkv's memory, and pdkv over theirs: the same bytes, by every protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pdkv
from gpu_check.arena import is_dry
from gpu_check.outcome import Outcome, StepFailedError, StepSkippedError

NBYTES = 4096


class DlpackOnly:
    """A tensor of which nothing is known but DLPack."""

    def __init__(self, tensor: Any) -> None:
        """Hides the rest of it."""
        self._tensor = tensor

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)


class ArrayOnly:
    """A tensor of which nothing is known but the CUDA array interface."""

    def __init__(self, tensor: Any) -> None:
        """Hides the rest of it."""
        self._tensor = tensor

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._tensor.__cuda_array_interface__


def run(_budget_s: float) -> Outcome:
    """Tries all of them.

    Raises:
        StepSkippedError: There is no torch.
        StepFailedError: Somebody sees other bytes.
    """
    if is_dry():
        raise StepSkippedError("real libraries are what is tried, and numpy is in torch's place here")
    import torch

    pool = pdkv.Engine.allocate(NBYTES, device="cuda:0")
    views: dict[str, Any] = {
        "torch.as_tensor": torch.as_tensor(pool, device="cuda:0"),
        "torch.from_dlpack": torch.from_dlpack(pool),
    }
    cupy, why = _cupy()
    if cupy is not None:
        views["cupy.asarray"] = cupy.asarray(pool)
        views["cupy.from_dlpack"] = cupy.from_dlpack(pool)
    for number, (name, view) in enumerate(views.items()):
        view[:] = number + 1
        torch.cuda.synchronize()
        seen = {other: int(tensor.sum()) for other, tensor in views.items()}
        if set(seen.values()) != {(number + 1) * NBYTES}:
            raise StepFailedError(f"after writing by `{name}` the sums are {seen}")
    given = registered(views["torch.as_tensor"].clone(), torch.cuda.synchronize)
    return Outcome(
        text=f"{', '.join(views)}; registered: {', '.join(given)}; {with_cupy(cupy, why)}",
        facts={"cupy": cupy is not None},
        absent=["cupy"] if cupy is None else [],
    )


def with_cupy(cupy: Any, why: str) -> str:
    """Says with which cupy it was tried, or why with none."""
    return f"nothing of cupy was tried: {why}" if cupy is None else f"cupy {cupy.__version__}"


def _cupy() -> tuple[Any, str]:
    """Imports cupy, and sees whether it works by itself; without it, why not."""
    try:
        import cupy

        if int(cupy.full(16, 3, dtype="u1").sum()) != 48:
            return None, "it can't add up"
    except Exception as error:  # noqa: BLE001 - whatever it lacks, it is not pdkv that is tried then
        return None, f"{type(error).__name__}: {error}"
    return cupy, ""


def registered(tensor: Any, synchronize: Callable[[], None]) -> list[str]:
    """Registers a tensor by each protocol, and reads it by a peer that knows none of them.

    What was asked of the tensor's stream is waited for first: the second version of the array interface, which torch
    speaks, names no stream, so nobody else would.

    Raises:
        StepFailedError: The peer sees other bytes.
    """
    ways = {"torch": tensor, "DLPack": DlpackOnly(tensor), "array interface": ArrayOnly(tensor)}
    with pdkv.Engine("owner") as owner, pdkv.Engine("reader") as reader:
        peer, target = reader.connect(str(owner.address)), pdkv.Engine.allocate(NBYTES, huge_pages=False)
        near = reader.register(target)
        for number, (name, way) in enumerate(ways.items()):
            tensor.fill_(number + 10)
            synchronize()
            region = owner.register(way)
            peer.read(near, region.describe(), require="cuda").wait()
            if bytes(memoryview(target)) != bytes([number + 10]) * NBYTES:
                raise StepFailedError(f"what was registered by `{name}` holds other bytes than its tensor")
    return list(ways)
