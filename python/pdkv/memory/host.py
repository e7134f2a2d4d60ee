"""Host memory by the array interface (numpy, and everything that speaks its protocol) and by the buffer protocol."""

from __future__ import annotations

from typing import Any

from pdkv import _core
from pdkv.errors import RegionError, UnsupportedError
from pdkv.memory.facts import OPERATION, MemoryFacts, contiguous, format_name, plain_name, typestr_name

__all__ = ["from_array_interface", "from_buffer"]


def from_array_interface(array: Any) -> MemoryFacts:
    """Reads `__array_interface__`."""
    interface = array.__array_interface__
    data = interface.get("data")
    if data is None:
        return from_buffer(array)
    address, readonly = data
    kind, itemsize = typestr_name(interface["typestr"])
    shape = tuple(interface["shape"])
    return MemoryFacts(
        address=address,
        shape=shape,
        strides=tuple(interface.get("strides") or contiguous(shape, itemsize)),
        itemsize=itemsize,
        dtype=kind if kind != "raw" else plain_name(getattr(array, "dtype", None)),
        readonly=bool(readonly),
        pinned=False,
        keep=array,
    )


def from_buffer(buffer: Any) -> MemoryFacts:
    """Reads what the buffer protocol lends.

    Raises:
        UnsupportedError: The object has no memory to speak of.
        RegionError: It refuses to hand it out.
    """
    try:
        # Holding the view keeps a `bytearray` or an `mmap` from being resized.
        view = memoryview(buffer)
    except TypeError as error:
        raise UnsupportedError(
            f"a `{type(buffer).__name__}` has no memory that pdkv can find",
            operation=OPERATION,
            hint="give a torch tensor, or anything with `__array_interface__`, `__cuda_array_interface__`, "
            "`__dlpack__` or the buffer protocol",
        ) from error
    except (BufferError, ValueError) as error:
        raise RegionError(f"the `{type(buffer).__name__}` refuses a view: {error}", operation=OPERATION) from error
    kind, itemsize = format_name(view.format, view.itemsize)
    return MemoryFacts(
        address=_core.buffer_address(view),
        shape=tuple(view.shape or ()),
        strides=tuple(view.strides or ()),
        itemsize=itemsize,
        dtype=kind,
        readonly=view.readonly,
        pinned=False,
        keep=view,
    )
