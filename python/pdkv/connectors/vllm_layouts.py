"""Which axes the tensor of one layer of vLLM's has, and the view of it that pdkv registers.

Reads its specification, shape and strides; moves nothing, registers nothing, and knows no groups. Where a block is one
stretch of memory and its axes are not plain (kernel blocks smaller than vLLM's, content that is packed over several
tokens or heads) it is taken as opaque bytes: both ends must then have them in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pdkv.errors import LayoutError

__all__ = ["Form", "form_of"]

_OPERATION = "register_kv_caches"
# Ways to quantise that leave the bytes of one token and head together, scales included. NVFP4's scales are behind the
# values of all heads of a block; of what comes later nothing is known.
_IN_CELLS = frozenset({"NONE", "FP8_PER_TENSOR", "ULTRAQUANT_4BIT"})
_IN_CELLS_LIKE = ("_PER_TOKEN_HEAD", "TURBOQUANT_")


class Form(NamedTuple):
    """How one layer is registered.

    Attributes:
        axes: Axes of the view, as `pdkv.Engine.register_kv_cache` takes them; `BC` for opaque bytes.
        view: The tensor itself, or a view of its memory as `[blocks, bytes]`.
        order: Of opaque bytes, what both ends must have equal beyond their number; empty otherwise.
    """

    axes: str
    view: Any
    order: str = ""

    @property
    def heads(self) -> int:
        """Heads in the view."""
        return int(self.view.shape[self.axes.index("H")]) if "H" in self.axes else 1

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that one cache can hold."""
        return (self.axes, self.order, tuple(self.view.shape), str(self.view.dtype))


def form_of(name: str, tensor: Any, spec: Any, num_blocks: int, cache_dtype: str = "auto") -> Form:
    """Finds how a layer is registered.

    Args:
        name: The layer.
        tensor: As vLLM registers it.
        spec: The layer's specification.
        num_blocks: Blocks of vLLM's.
        cache_dtype: vLLM's `--kv-cache-dtype`.

    Raises:
        LayoutError: A block lies in pieces that pdkv can't name.
    """
    axes = _axes(tensor, num_blocks, int(spec.block_size))
    if axes is not None and (_has_cells(spec, cache_dtype) or _one_head(tensor, axes)):
        return Form(axes, tensor)
    return Form("BC", _opaque(name, tensor, num_blocks), _order(tensor))


def _has_cells(spec: Any, cache_dtype: str) -> bool:
    mode = getattr(spec, "kv_quant_mode", None)
    if mode is None:  # a release that does not say
        return not cache_dtype.startswith("nvfp4")
    name = str(getattr(mode, "name", mode))
    return name in _IN_CELLS or any(part in name for part in _IN_CELLS_LIKE)


def _one_head(tensor: Any, axes: str) -> bool:
    """Whether there is only one order in which a block's rows can lie."""
    return "K" not in axes and ("H" not in axes or tensor.shape[axes.index("H")] == 1)


def _order(tensor: Any) -> str:
    """Shape of a kernel's block, and its axes from the largest stride to the smallest."""
    strides = tensor.stride()[1:]
    return f"{list(tensor.shape[1:])}@{sorted(range(len(strides)), key=lambda axis: -strides[axis])}"


def _axes(tensor: Any, num_blocks: int, tokens: int) -> str | None:
    """Which axis of a layer's tensor is which, or `None` if it can only be taken as bytes."""
    shape: Sequence[int] = tuple(tensor.shape)
    if len(shape) == 4 and shape[0] == num_blocks and shape[2] == tokens:
        return "BHNC"
    if len(shape) == 5 and shape[:3] == (2, num_blocks, tokens):
        return "KBNHC"
    if len(shape) == 5 and (shape[0], shape[1], shape[2]) == (num_blocks, 2, tokens):
        return "BKNHC"
    if len(shape) == 3 and shape[:2] == (num_blocks, tokens):
        return "BNC"
    return None


def _opaque(name: str, tensor: Any, num_blocks: int) -> Any:
    """A view `[blocks, bytes]` of a layer whose blocks are single stretches of memory."""
    itemsize = tensor.element_size()
    rows = tensor.shape[0]
    inner = sorted(
        (stride, extent) for stride, extent in zip(tensor.stride()[1:], tensor.shape[1:], strict=True) if extent > 1
    )
    stretch = 1
    for stride, extent in inner:
        if stride != stretch:
            raise _scattered(name, tensor)
        stretch *= extent
    ratio, rest = divmod(rows, num_blocks)
    if rest or ratio == 0 or (ratio > 1 and tensor.stride(0) != stretch):
        raise _scattered(name, tensor)
    import torch

    flat = torch.as_strided(tensor, (num_blocks, ratio * stretch), (ratio * tensor.stride(0), 1))
    return flat if itemsize == 1 else flat.view(torch.uint8)


def _scattered(name: str, tensor: Any) -> LayoutError:
    return LayoutError(
        f"blocks of layer `{name}` lie in pieces: shape `{list(tensor.shape)}`, strides `{list(tensor.stride())}`",
        operation=_OPERATION,
        hint="set VLLM_KV_CACHE_LAYOUT to `LBHNC` or `LBNHC` on both engines",
    )
