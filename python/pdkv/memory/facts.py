"""What is known of a tensor's memory, and how the protocols spell element types and strides."""

from __future__ import annotations

from typing import Any, NamedTuple

from pdkv.errors import LayoutError, RegionError, UnsupportedError

__all__ = [
    "CPU",
    "OPERATION",
    "MemoryFacts",
    "contiguous",
    "elsewhere",
    "format_name",
    "nonsense",
    "plain_name",
    "typestr_name",
]

OPERATION = "memory"
CPU = "cpu"
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
        device: `"cpu"`; `"cuda:0"` and so on; `"cuda"` where the tensor does not say which GPU.
        stream: Handle of the CUDA stream on which the owner last wrote: what was asked of it comes before the first
            use. `None` when there is nothing to wait for.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    readonly: bool
    pinned: bool
    keep: object
    device: str = CPU
    stream: int | None = None


def typestr_name(text: str) -> tuple[str, int]:
    """Reads a type of the array interfaces, such as `"<f2"`: its name and the bytes of an element.

    Raises:
        LayoutError: The elements are big-endian.
    """
    order, kind, itemsize = text[0], text[1], int(text[2:])
    if kind == "b":
        return "bool", itemsize
    if kind in _KINDS:
        if order == ">":
            raise LayoutError(f"the elements are big-endian (`{text}`)", operation=OPERATION)
        return f"{_KINDS[kind]}{8 * itemsize}", itemsize
    return "raw", itemsize


def format_name(text: str, itemsize: int) -> tuple[str, int]:
    """Reads a format of the buffer protocol, such as `"e"`: its name and the bytes of an element."""
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


def plain_name(dtype: Any) -> str:
    """Names a type that calls itself void in an array interface: bfloat16 and the fp8 flavours of ml_dtypes do."""
    name = getattr(dtype, "name", "")
    return name if name and not name.startswith(("void", "record")) else "raw"


def contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Makes the strides of elements that follow one another, the last axis fastest."""
    strides = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def elsewhere(kind: str, what: str, hint: str | None = None) -> UnsupportedError:
    """Makes the refusal of memory that pdkv does not reach."""
    return UnsupportedError(
        f"the `{what}` lies in `{kind}` memory",
        operation=OPERATION,
        context={"device": kind},
        hint=hint or "pdkv moves host memory and memory of NVIDIA GPUs: copy to one of them",
    )


def nonsense(what: str, problem: object) -> RegionError:
    """Makes the refusal of an object that says of its memory what can't be."""
    return RegionError(f"a `{what}` says of its memory what can't be: {problem}", operation=OPERATION)
