"""Tensors as a pipe sees them: a dtype's name, a shape, strides, an address; and back again from received bytes.

Knows torch and numpy by what they are asked, imports neither until a tensor has to be made, and moves no byte.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from pdkv.errors import IntegrityError, LayoutError, UnsupportedError

__all__ = ["Description", "describe", "maker"]

_OPERATION = "send_tensor"


class Description(NamedTuple):
    """Where a tensor's elements are.

    Attributes:
        dtype: Its name, as torch and numpy say it: `"bfloat16"`, `"float8_e4m3fn"`. `None` for no tensor.
        shape: Extents; `()` for a scalar.
        strides: Of each dimension, in elements.
        itemsize: Bytes of an element.
        address: Of the first element; 0 where there is none.
        keeper: What keeps the memory there.
    """

    dtype: str | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    address: int
    keeper: object


_torch_names: dict[Any, str] = {}
_torch_dtypes: dict[str, Any] = {}


def describe(tensor: Any) -> Description:
    """Describes a torch tensor in host memory or a numpy array, without copying it.

    A tensor whose conjugate or negative bit is set is resolved first, which copies.

    Raises:
        UnsupportedError: A sparse or quantized tensor, one on a device that has no memory here, or objects as elements.
        LayoutError: It is no tensor.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _describe_torch(torch, tensor)
    interface = getattr(tensor, "__array_interface__", None)
    if interface is not None:
        return _describe_array(tensor, interface)
    raise LayoutError(
        f"`{type(tensor).__name__}` is no tensor",
        operation=_OPERATION,
        hint="give a torch tensor, a numpy array or None",
    )


def _describe_torch(torch: Any, tensor: Any) -> Description:
    if not _torch_names:
        _learn(torch)
    name = _torch_names.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or not tensor.is_cpu:
        raise UnsupportedError(
            f"a tensor of dtype `{tensor.dtype}`, layout `{tensor.layout}`, on `{tensor.device}`",
            operation=_OPERATION,
            hint="send dense tensors in host memory; of a quantized one its int_repr(), scales and zero points",
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return Description(name, tuple(tensor.shape), tensor.stride(), tensor.element_size(), tensor.data_ptr(), tensor)


def _describe_array(array: Any, interface: dict[str, Any]) -> Description:
    dtype = array.dtype
    itemsize = int(dtype.itemsize)
    if dtype.hasobject or dtype.names is not None or not dtype.isnative or not itemsize:
        raise UnsupportedError(
            f"an array of dtype `{dtype}`", operation=_OPERATION, hint="send numbers in this machine's byte order"
        )
    if any(stride % itemsize for stride in array.strides):
        # Between the elements of something larger, such as one field of a record.
        array = array.copy(order="C")
        interface = array.__array_interface__
    strides = tuple(stride // itemsize for stride in array.strides)
    return Description(dtype.name, array.shape, strides, itemsize, interface["data"][0], array)


def _learn(torch: Any) -> None:
    """Reads the names of torch's dtypes; the quantized ones mean nothing without their scales."""
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            name = str(value).removeprefix("torch.")
            if not name.startswith(("qint", "quint")):
                _torch_names[value] = name
                _torch_dtypes[name] = value


def maker(library: str | None) -> Callable[[str, tuple[int, ...], Any], Any]:
    """What makes tensors of received bytes.

    Args:
        library: `"torch"`, `"numpy"`, or `None` for torch where it is installed.

    Returns:
        A function of a dtype's name, a shape and a buffer of just those bytes (`None` where there are none). The
        tensor is a view of the buffer and keeps it.

    Raises:
        UnsupportedError: The library is not installed.
    """
    if library not in (None, "torch", "numpy"):
        raise UnsupportedError(f"`{library}` makes no tensors", operation="pipe", hint="`torch` or `numpy`")
    for name in ("torch", "numpy") if library is None else (library,):
        try:
            __import__(name)
        except ModuleNotFoundError:
            continue
        return _make_torch if name == "torch" else _make_array
    raise UnsupportedError(
        f"`{library or 'torch'}` is not installed", operation="pipe", hint="install torch, or numpy for arrays"
    )


def _make_torch(name: str, shape: tuple[int, ...], buffer: Any) -> Any:
    import torch

    if not _torch_dtypes:
        _learn(torch)
    dtype = _torch_dtypes.get(name)
    if dtype is None:
        raise _unknown(name, f"torch {torch.__version__}")
    if not _checked(name, shape, dtype.itemsize, buffer):
        return _shaped(torch.empty(0, dtype=torch.uint8).view(dtype), shape)
    flat = torch.frombuffer(buffer, dtype=dtype)
    # A view takes longer than all the rest of a small tensor.
    return flat if len(shape) == 1 else flat.view(shape)


def _make_array(name: str, shape: tuple[int, ...], buffer: Any) -> Any:
    import numpy as np

    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise _unknown(name, "numpy") from error
    # numpy reads whole structures out of a string; only what is a number's own name comes from a peer.
    if dtype.hasobject or dtype.name != name:
        raise _unknown(name, "numpy")
    if not _checked(name, shape, dtype.itemsize, buffer):
        return _shaped(np.empty(0, dtype), shape)
    return np.frombuffer(buffer, dtype).reshape(shape)


def _checked(name: str, shape: tuple[int, ...], itemsize: int, buffer: Any) -> int:
    """The bytes of the tensor, which are those that came."""
    expected, came = math.prod(shape) * itemsize, 0 if buffer is None else buffer.nbytes
    if came != expected:
        raise IntegrityError(
            f"`{came}` bytes came for a `{name}` tensor of shape `{list(shape)}`, which has `{expected}`",
            operation="recv_tensor",
        )
    return expected


def _shaped(empty: Any, shape: tuple[int, ...]) -> Any:
    """An empty tensor of a peer's shape, whose other extents may be more than there is."""
    try:
        return empty.reshape(shape)
    except (ValueError, RuntimeError, OverflowError, TypeError) as error:
        raise IntegrityError(f"a tensor of shape `{list(shape)}` came: {error}", operation="recv_tensor") from error


def _unknown(name: str, library: str) -> UnsupportedError:
    return UnsupportedError(
        f"a tensor of dtype `{name}` came, which {library} does not have",
        operation="recv_tensor",
        hint="send another dtype, view it as `uint8`, or receive with torch",
    )
