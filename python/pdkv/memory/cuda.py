"""Memory of a GPU by the CUDA array interface (cupy, numba, `pdkv.Pool`), versions 2 and 3, and what a stream is in it.

Which GPU it is the interface does not say; the native side asks the driver for the address.
"""

from __future__ import annotations

from typing import Any

from pdkv.errors import LayoutError, RegionError, UnsupportedError
from pdkv.memory.facts import OPERATION, MemoryFacts, contiguous, nonsense, plain_name, typestr_name

__all__ = ["LEGACY_STREAM", "from_cuda_array_interface", "lacks_stream"]

_VERSIONS = (2, 3)
_WITH_STREAM = 3
LEGACY_STREAM = 1  # the driver's handle of the legacy default stream, which CUDA's runtime also calls 0


def from_cuda_array_interface(array: Any) -> MemoryFacts:
    """Reads `__cuda_array_interface__`.

    Raises:
        UnsupportedError: It is of another version.
        LayoutError: The array is masked.
        RegionError: It says what can't be.
    """
    what = type(array).__name__
    try:
        return _read(array.__cuda_array_interface__, array, what)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, (LayoutError, RegionError)):
            raise
        raise nonsense(what, f"{type(error).__name__}: {error}") from error


def lacks_stream(array: Any) -> bool:
    """Whether the interface is of a version that can't say on which stream its owner still works."""
    try:
        return bool(array.__cuda_array_interface__["version"] < _WITH_STREAM)
    except (AttributeError, KeyError, TypeError):
        return False  # nonsense, which reading it names


def _read(interface: dict[str, Any], array: Any, what: str) -> MemoryFacts:
    version = interface["version"]
    if version not in _VERSIONS:
        raise UnsupportedError(
            f"the `{what}` speaks version `{version}` of the CUDA array interface",
            operation=OPERATION,
            hint="pdkv reads versions 2 and 3",
        )
    if interface.get("mask") is not None:
        raise LayoutError(
            f"the `{what}` is masked",
            operation=OPERATION,
            hint="register the array under the mask: pdkv moves all of it",
        )
    address, readonly = interface["data"]
    kind, itemsize = typestr_name(interface["typestr"])
    shape = tuple(interface["shape"])
    return MemoryFacts(
        address=int(address),
        shape=shape,
        strides=tuple(interface.get("strides") or contiguous(shape, itemsize)),
        itemsize=itemsize,
        dtype=kind if kind != "raw" else plain_name(getattr(array, "dtype", None)),
        readonly=bool(readonly),
        pinned=False,
        keep=array,
        device="cuda",
        # Before version 3 the interface says nothing of streams. The legacy default one is where work without a stream
        # is put, and it comes after all streams but those that were made not to wait for it.
        stream=_stream(interface.get("stream"), what) if version >= _WITH_STREAM else LEGACY_STREAM,
    )


def _stream(stream: Any, what: str) -> int | None:
    """Reads the stream on which the array's owner works: 1 and 2 are the default ones, `None` is none."""
    if stream is None:
        return None
    if isinstance(stream, bool) or not isinstance(stream, int) or stream < 0:
        raise nonsense(what, f"its stream is `{stream!r}`")
    if stream == 0:
        raise RegionError(
            f"the `{what}` names the stream `0`, which the CUDA array interface forbids",
            operation=OPERATION,
            hint="0 may be either default stream: its library must say 1 (legacy), 2 (per thread), or None",
        )
    return stream
