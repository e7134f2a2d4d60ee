"""Names the axes of KV cache tensors, by letters or as vLLM names its layouts.

Letters: `B` blocks, `H` KV heads, `N` tokens in a block, `C` content of one token and head (`D` is
the same), `K` a leading axis of two (keys, values), `L` layers. Where the bytes are is always read
from strides; a name only says which axis is which, and is checked against the strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pdkv.errors import LayoutError
from pdkv.memory import MemoryFacts, describe

__all__ = ["Layout", "collect", "parse"]

_OPERATION = "layout"
# vLLM's names say how the bytes lie; its per-layer views are [B, H, N, C] whatever the name.
_VLLM_VIEW = "BHNC"
_VLLM_ORDERS = {
    "LBHNC": "BHNC",
    "LBNHC": "BNHC",
    "LHBNC": "HBNC",
    "BLHNC": "BHNC",
    "BLNHC": "BNHC",
    "BHLNC": "BHNC",
    "HND": "BHNC",
    "NHD": "BNHC",
}


class Layout(NamedTuple):
    """Which axis of a tensor is which.

    Attributes:
        axes: One letter for each axis of the tensor's shape, in order.
        order: The same letters from the largest stride to the smallest, or `None` for any.
    """

    axes: str
    order: str | None = None


class Layer(NamedTuple):
    """The tensors of one layer: one, or keys and values apart."""

    name: str
    first: MemoryFacts
    second: MemoryFacts | None


def parse(layout: str | Layout) -> Layout:
    """Reads a layout.

    Args:
        layout: Axes such as `"BHNC"`, `"KBNHC"` or `"BC"`, or a name of vLLM's (`"HND"`, `"NHD"`,
            `"LBHNC"`, `"BLNHC"`, ...), which stands for `[B, H, N, C]` views that lie as the name says.

    Returns:
        The axes and, for a name, the order that the strides must have.
    """
    if isinstance(layout, Layout):
        return layout
    order = _VLLM_ORDERS.get(layout)
    return Layout(layout) if order is None else Layout(_VLLM_VIEW, order)


def collect(tensors: Any, layout: str | Layout) -> tuple[str, list[Layer]]:
    """Finds the memory of all layers.

    Args:
        tensors: A mapping from layer name to a tensor or a `(keys, values)` pair, in model order; a
            sequence of those; or one tensor with an `L` axis.
        layout: See `parse`.

    Returns:
        The axes of each layer's tensors, and the layers.

    Raises:
        LayoutError: A tensor contradicts the layout.
    """
    if isinstance(tensors, Mapping):
        named: Iterator[tuple[str, Any]] = ((str(name), value) for name, value in tensors.items())
    elif isinstance(tensors, Sequence) and not isinstance(tensors, (bytes, bytearray, memoryview)):
        named = ((f"layers.{index}", value) for index, value in enumerate(tensors))
    else:
        return _split_layers(describe(tensors), layout)
    wish = parse(layout)
    layers = [_layer(name, value) for name, value in named]
    for layer in layers:
        for facts in (layer.first, layer.second):
            if facts is not None:
                _check_order(layer.name, facts, wish)
    return wish.axes, layers


def _layer(name: str, value: Any) -> Layer:
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise LayoutError(f"layer `{name}` has `{len(value)}` tensors, not keys and values", operation=_OPERATION)
        return Layer(name, describe(value[0]), describe(value[1]))
    return Layer(name, describe(value), None)


def _split_layers(facts: MemoryFacts, layout: str | Layout) -> tuple[str, list[Layer]]:
    axes = layout.axes if isinstance(layout, Layout) else layout
    if "L" not in axes or len(axes) != len(facts.shape):
        raise LayoutError(
            f"one tensor of shape `{list(facts.shape)}` can't be read as `{axes}` with an `L` axis",
            operation=_OPERATION,
            hint='give a mapping from layer name to tensor, or axes with one letter a dimension, such as "LBHNC"',
        )
    where = axes.index("L")
    rest = axes[:where] + axes[where + 1 :]
    step = facts.strides[where]
    shape = facts.shape[:where] + facts.shape[where + 1 :]
    strides = facts.strides[:where] + facts.strides[where + 1 :]
    layers = [
        Layer(
            f"layers.{index}",
            facts._replace(address=facts.address + index * step, shape=shape, strides=strides),
            None,
        )
        for index in range(facts.shape[where])
    ]
    return rest, layers


def _check_order(name: str, facts: MemoryFacts, wish: Layout) -> None:
    if wish.order is None or len(facts.shape) != len(wish.axes):
        return  # the native side compares shape and axes, with a better message
    extent = dict(zip(wish.axes, facts.shape, strict=True))
    stride = dict(zip(wish.axes, facts.strides, strict=True))
    real = [axis for axis in wish.order if extent[axis] > 1]
    found = sorted(real, key=lambda axis: -stride[axis])
    if found != real:
        raise LayoutError(
            f"layer `{name}` lies as `{''.join(found)}` but the layout says `{''.join(real)}`",
            operation=_OPERATION,
            context={"strides_bytes": str(list(facts.strides))},
            hint=f'give the axes of the tensor\'s shape, "{wish.axes}": strides are honoured whatever they are',
        )
