"""What a transfer would cost, from shapes alone: no tensor is allocated and nothing moves."""

from __future__ import annotations

from typing import Any, NamedTuple

from pdkv._core import Engine, KvLayout, Link, plan, resolve_layout
from pdkv.errors import ConfigError

__all__ = ["Shape", "links", "transfer"]

_AXES = "LBHNC"


class Shape(NamedTuple):
    """Sizes of a KV cache; `content` counts the elements of one token and head, K and V together."""

    layers: int
    heads: int
    tokens: int
    content: int
    item_bytes: int


class _Blueprint:
    """One layer's tensor that has an address, a shape and strides, but no memory."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"<u{item_bytes}",
        }


def transfer(shape: Shape, src: str, dst: str, blocks: int, run: int) -> str:
    """Explains how `blocks` blocks would move.

    Args:
        shape: Sizes of the cache on both sides.
        src: Order of the axes in the source's memory, such as `"LBHNC"`.
        dst: The same for the destination.
        blocks: How many blocks.
        run: How many neighbouring blocks follow one another in both tables.

    Raises:
        ConfigError: A size or an order is bad.
        LayoutError: The one can't become the other.
    """
    if min(*shape, blocks, run) < 1:
        raise ConfigError("sizes and counts must be at least 1", operation="explain")
    # Runs with a gap after each, in opposite directions, so that nothing merges beyond a run.
    starts = range(0, -(-blocks // run) * (run + 1), run + 1)
    ids = [start + step for start in starts for step in range(run)][:blocks]
    there = [start + step for start in reversed(starts) for step in range(run)][:blocks]
    pool = max(*ids, *there) + 1
    return plan(_layout(shape, src, pool), ids, _layout(shape, dst, pool), there).explain()


def links(address: str) -> str:
    """Says which transports reach the engine at `address`, best first, and why others do not.

    Of each that does it says how memory of GPUs would go.

    Raises:
        PeerUnreachableError: Nobody answers.
    """
    with Engine("explain", listen=None) as engine:
        peer = engine.connect(address)
        return "\n".join([f"{peer.name} at {peer.address}", *map(_line, peer.links())])


def _line(link: Link) -> str:
    if not link.usable:
        return f"{link.transport}: not usable, {link.why}"
    return f"{link.transport}: usable, {link.why}; memory of GPUs: {link.gpu}"


def _layout(shape: Shape, order: str, blocks: int) -> KvLayout:
    if sorted(order) != sorted(_AXES):
        raise ConfigError(
            f"`{order}` is not an order of the axes", operation="explain", hint=f"use each letter of `{_AXES}` once"
        )
    sizes = dict(zip(_AXES, (shape.layers, blocks, shape.heads, shape.tokens, shape.content), strict=True))
    strides: dict[str, int] = {}
    step = shape.item_bytes
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    view = [axis for axis in _AXES if axis != "L"]
    base = 1 << 21  # any address that is not null
    tensors = {
        f"layers.{layer}": _Blueprint(
            base + layer * strides["L"],
            tuple(sizes[axis] for axis in view),
            tuple(strides[axis] for axis in view),
            shape.item_bytes,
        )
        for layer in range(shape.layers)
    }
    return resolve_layout(tensors, layout="BHNC", block_tokens=shape.tokens)
