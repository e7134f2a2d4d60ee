"""Finds the memory behind a tensor: address, shape, strides and dtype.

Tensors come as torch tensors, by the array interface (numpy, and everything that speaks its
protocol), by DLPack (JAX, cupy, ...) or by the buffer protocol (`bytearray`, `mmap`, `pdkv.Pool`).
None of those libraries is imported here. Device memory is recognised and refused by name. This
module moves no bytes and keeps nothing: whoever registers memory holds on to `MemoryFacts.keep`.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from pdkv import _core
from pdkv.errors import LayoutError, RegionError, UnsupportedError

__all__ = ["MemoryFacts", "describe"]

_OPERATION = "memory"
_DLPACK_CPU = (1, 3, 11)  # plain host memory, and host memory pinned for CUDA or ROCm
_DLPACK_PINNED = (3, 11)
_DLPACK_NAMES = {
    1: "CPU",
    2: "CUDA",
    4: "OpenCL",
    7: "Vulkan",
    8: "Metal",
    10: "ROCm",
    13: "CUDA managed",
    14: "oneAPI",
}
_KINDS = {"i": "int", "u": "uint", "f": "float"}


class MemoryFacts(NamedTuple):
    """Where a tensor lies and what it holds.

    Attributes:
        address: Address of the first element (index 0 on every axis).
        shape: Elements along each axis.
        strides: Bytes from one element to the next along each axis; may be negative.
        itemsize: Bytes of one element.
        dtype: Name of the element type, for example `"bfloat16"`, `"float8_e4m3fn"`, `"raw"`.
        readonly: Whether the owner forbids writing.
        pinned: Whether a device driver holds the pages in place.
        keep: Whatever must stay alive for the address to stay valid.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    readonly: bool
    pinned: bool
    keep: object


def describe(tensor: Any) -> MemoryFacts:
    """Finds the host memory behind `tensor`.

    Args:
        tensor: A torch tensor, or anything with `__array_interface__`, `__dlpack__` or the buffer protocol.

    Returns:
        The facts, with whatever keeps the memory alive.

    Raises:
        UnsupportedError: The memory is on a device, or `tensor` has no memory to speak of.
        RegionError: The object refuses to hand out its memory.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _from_torch(tensor)
    if hasattr(tensor, "__cuda_array_interface__"):
        raise _device("CUDA", type(tensor).__name__)
    if hasattr(tensor, "__array_interface__"):
        return _from_array_interface(tensor)
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        return _from_dlpack(tensor)
    return _from_buffer(tensor)


def _from_torch(tensor: Any) -> MemoryFacts:
    kind = tensor.device.type
    if kind != "cpu":
        raise _device(kind, "torch.Tensor")
    if str(tensor.layout) != "torch.strided":
        raise LayoutError(f"the tensor has the layout `{tensor.layout}`", operation=_OPERATION)
    itemsize = tensor.element_size()
    return MemoryFacts(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(step * itemsize for step in tensor.stride()),
        itemsize=itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
        readonly=False,
        pinned=_is_pinned(tensor),
        # The storage too: `tensor.set_()` would let go of it.
        keep=(tensor, tensor.untyped_storage()),
    )


def _is_pinned(tensor: Any) -> bool:
    # Without an accelerator nothing can be pinned, and asking would make torch start one.
    torch = sys.modules["torch"]
    return bool(torch.cuda.is_initialized() and tensor.is_pinned())


def _from_array_interface(array: Any) -> MemoryFacts:
    interface = array.__array_interface__
    data = interface.get("data")
    if data is None:
        return _from_buffer(array)
    address, readonly = data
    kind, itemsize = _typestr(interface["typestr"])
    shape = tuple(interface["shape"])
    # Types that numpy does not know (bfloat16 and the fp8 flavours of ml_dtypes) call themselves
    # void in `typestr` and give their name only here.
    dtype = kind if kind != "raw" else _plain_name(getattr(array, "dtype", None))
    return MemoryFacts(
        address=address,
        shape=shape,
        strides=tuple(interface.get("strides") or _contiguous(shape, itemsize)),
        itemsize=itemsize,
        dtype=dtype,
        readonly=bool(readonly),
        pinned=False,
        keep=array,
    )


def _from_dlpack(tensor: Any) -> MemoryFacts:
    device, _ = tensor.__dlpack_device__()
    if int(device) not in _DLPACK_CPU:
        raise _device(_DLPACK_NAMES.get(int(device), f"DLPack device {int(device)}"), type(tensor).__name__)
    try:
        capsule = tensor.__dlpack__(max_version=(1, 1))
    except TypeError:
        capsule = tensor.__dlpack__()
    address, shape, strides, itemsize, dtype, readonly = _core.dlpack_facts(capsule)
    return MemoryFacts(
        address=address,
        shape=tuple(shape),
        strides=_contiguous(tuple(shape), itemsize) if strides is None else tuple(strides),
        itemsize=itemsize,
        dtype=dtype,
        readonly=readonly,
        pinned=int(device) in _DLPACK_PINNED,
        # A capsule nobody consumed lets go of the memory when it is collected.
        keep=(tensor, capsule),
    )


def _from_buffer(buffer: Any) -> MemoryFacts:
    try:
        # Holding the view keeps a `bytearray` or an `mmap` from being resized.
        view = memoryview(buffer)
    except TypeError as error:
        raise UnsupportedError(
            f"a `{type(buffer).__name__}` has no memory that pdkv can find",
            operation=_OPERATION,
            hint="give a torch tensor, or anything with `__array_interface__`, `__dlpack__` or the buffer protocol",
        ) from error
    except (BufferError, ValueError) as error:
        raise RegionError(f"the `{type(buffer).__name__}` refuses a view: {error}", operation=_OPERATION) from error
    kind, itemsize = _format(view.format, view.itemsize)
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


def _typestr(text: str) -> tuple[str, int]:
    order, kind, itemsize = text[0], text[1], int(text[2:])
    if kind == "b":
        return "bool", itemsize
    if kind in _KINDS:
        if order == ">":
            raise LayoutError(f"the elements are big-endian (`{text}`)", operation=_OPERATION)
        return f"{_KINDS[kind]}{8 * itemsize}", itemsize
    return "raw", itemsize


def _format(text: str, itemsize: int) -> tuple[str, int]:
    letter = text.lstrip("@=<>!")
    if letter == "?":
        return "bool", itemsize
    if letter in ("e", "f", "d"):
        return f"float{8 * itemsize}", itemsize
    if letter in ("b", "h", "i", "l", "q", "n"):
        return f"int{8 * itemsize}", itemsize
    if letter in ("B", "H", "I", "L", "Q", "N"):
        return f"uint{8 * itemsize}", itemsize
    return "raw", itemsize


def _plain_name(dtype: Any) -> str:
    name = getattr(dtype, "name", "")
    return name if name and not name.startswith(("void", "record")) else "raw"


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _device(kind: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the `{what}` lies in `{kind}` memory",
        operation=_OPERATION,
        context={"device": kind},
        hint="this release moves host memory only: copy to the CPU, or register a CPU tensor",
    )
