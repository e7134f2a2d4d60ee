"""A group of layers that share block ids: its tensors, how they are registered, and what a consumer must find equal.

Knows nothing of engines of LLMs: whoever has the tensors says which layout they have and which part of a model they
are.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdkv.connectors.core.shown import shown
from pdkv.errors import CapacityError, LayoutError, RegionError, UnsupportedError

if TYPE_CHECKING:
    from pdkv.engine import Engine, KvCache, Shard
    from pdkv.layout import Layout

__all__ = ["GroupCache", "GroupFacts", "compare", "describe", "register"]

_log = logging.getLogger("pdkv.connectors")

_OPERATION = "compare caches"

# What a directory tells of a group: plain values by name.
GroupFacts = Mapping[str, object]
# Told for people only: where the bytes lie may differ.
_NOT_COMPARED = frozenset({"layout", "num_blocks"})


@dataclass(frozen=True, slots=True)
class GroupCache:
    """The tensors of one group.

    Attributes:
        tensors: Layer name to tensor, or to a `(keys, values)` pair, in model order.
        layout: Axes of the tensors such as `"BHNC"`, or a name of vLLM's.
        block_tokens: Tokens that a block holds.
        shard: Which part of the model it is; the whole of it by default.
        adopt: Move the memory in place to where peers on this host reach it directly; see `Engine.register`.
    """

    tensors: Mapping[str, Any]
    layout: str | Layout
    block_tokens: int
    shard: Shard | None = None
    adopt: bool = False


def register(engine: Engine, group: GroupCache, index: int, model: str, *, adopt: bool = True) -> KvCache:
    """Registers a group's tensors.

    Args:
        engine: Whom with.
        group: The tensors.
        index: Which group it is. Blocks of one group never pass for those of another.
        model: Name of the model.
        adopt: Whether memory may be adopted. Where it can't be, it stays where it is, and a line in the log says why.

    Raises:
        LayoutError: A tensor contradicts the layout.
        RegionError: The memory can't be registered; says why.
        UnsupportedError: It is device memory.
    """

    def registered(*, adopt: bool) -> KvCache:
        return engine.register_kv_cache(
            dict(group.tensors),
            layout=group.layout,
            block_tokens=group.block_tokens,
            shard=group.shard,
            model=_model_of(index, model),
            adopt=adopt,
        )

    if adopt and group.adopt:
        try:
            return registered(adopt=True)
        except (UnsupportedError, RegionError, CapacityError) as error:
            _log.warning("the memory of group `%d` stays private, so peers on this host copy slower: %s", index, error)
    return registered(adopt=False)


def describe(cache: KvCache, group: GroupCache, index: int, model: str) -> dict[str, object]:
    """Gives what a directory tells of a group: plain values, no address, no secret."""
    layout, shard = cache.layout, group.shard
    names = hashlib.blake2b("\0".join(layout.layer_names).encode(), digest_size=8).hexdigest()
    return {
        "fingerprint": cache.fingerprint,
        "model": _model_of(index, model),
        "layer_names": names,
        "layers": layout.num_layers,
        "first_layer": shard.first_layer if shard else 0,
        "total_layers": shard.total_layers if shard else layout.num_layers,
        "heads": layout.num_heads,
        "first_head": shard.first_head if shard else 0,
        "total_heads": shard.total_heads if shard else layout.num_heads,
        "block_tokens": layout.block_tokens,
        "dtype": layout.dtype,
        "content_bytes": layout.content_bytes,
        "planes": layout.num_planes,
        "num_blocks": layout.num_blocks,
        "layout": layout.describe(),
    }


def compare(mine: Sequence[GroupFacts], theirs: Sequence[GroupFacts], whose: str) -> None:
    """Compares the caches of two ends.

    Args:
        mine: What this end would tell.
        theirs: What the other end tells.
        whose: What to call the other end.

    Raises:
        LayoutError: They can't exchange blocks; names every differing field with both values.
    """
    differences = list[tuple[str, object, object]]()
    if len(mine) != len(theirs):
        differences.append(("groups", len(mine), len(theirs)))
    for index, (ours, other) in enumerate(zip(mine, theirs, strict=False)):
        fields = [name for name in ours if name not in _NOT_COMPARED and ours[name] != other.get(name)]
        # It says only that something differs, which the others say better.
        if len(fields) > 1 and "fingerprint" in fields:
            fields.remove("fingerprint")
        differences += [(f"{name} of group {index}", ours[name], other.get(name)) for name in fields]
    if differences:
        text = ", ".join(f"{name} is `{ours}` here and `{shown(other)}` there" for name, ours, other in differences)
        raise LayoutError(
            f"the caches of {whose} do not fit: {text}",
            operation=_OPERATION,
            context={name: f"{ours} here, {shown(other)} there" for name, ours, other in differences},
            hint="start both ends with the same model, dtype, block size, parallel sizes and cache groups",
        )


def _model_of(index: int, model: str) -> str:
    return f"{model}#{index}"
