"""Layers that share block ids: their tensors, how they are registered, and what a consumer must find equal.

A group whose layers are alike is one cache. Where they differ in shape or type it is several, with the same block ids.
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

__all__ = ["GroupCache", "GroupFacts", "compare", "describe", "numbered", "register"]

_log = logging.getLogger("pdkv.connectors")

_OPERATION = "compare caches"

# What a directory tells of a cache: plain values by name.
GroupFacts = Mapping[str, object]
# Told for people only: where the bytes lie may differ.
_NOT_COMPARED = frozenset({"layout", "num_blocks"})
# Characters of a text that are shown before the first one that differs.
_BEFORE = 32


@dataclass(frozen=True, slots=True)
class GroupCache:
    """Layers of one group that are alike.

    Attributes:
        tensors: Layer name to tensor, or to a `(keys, values)` pair, in model order.
        layout: Axes of the tensors such as `"BHNC"`, or a name of vLLM's.
        block_tokens: Tokens that a block holds.
        shard: Which part of the model it is; the whole of it by default.
        adopt: Move the memory in place to where peers on this host reach it directly; see `Engine.register`.
        group: The group whose block ids these are; by default each cache is a group.
        model: What the bytes mean beyond their shapes, if not what is said of all caches.
    """

    tensors: Mapping[str, Any]
    layout: str | Layout
    block_tokens: int
    shard: Shard | None = None
    adopt: bool = False
    group: int | None = None
    model: str = ""


def numbered(caches: Sequence[GroupCache]) -> list[tuple[int, str]]:
    """Gives each cache's group and its name: the group's number, and behind a point its own where there are several."""
    groups = [index if cache.group is None else cache.group for index, cache in enumerate(caches)]
    names = []
    for index, group in enumerate(groups):
        place = groups[:index].count(group)
        names.append(f"{group}.{place}" if groups.count(group) > 1 else str(group))
    return list(zip(groups, names, strict=True))


def register(engine: Engine, group: GroupCache, name: str, model: str, *, adopt: bool = True) -> KvCache:
    """Registers a cache's tensors.

    Args:
        engine: Whom with.
        group: The tensors.
        name: Which cache it is, see `numbered`. Blocks of one never pass for those of another.
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
            model=_model_of(name, group, model),
            adopt=adopt,
        )

    if adopt and group.adopt:
        try:
            return registered(adopt=True)
        except (UnsupportedError, RegionError, CapacityError) as error:
            _log.warning("the memory of group `%s` stays private, so peers on this host copy slower: %s", name, error)
    return registered(adopt=False)


def describe(cache: KvCache, group: GroupCache, name: str, model: str) -> dict[str, object]:
    """Gives what a directory tells of a cache: plain values, no address, no secret."""
    layout, shard = cache.layout, group.shard
    names = hashlib.blake2b("\0".join(layout.layer_names).encode(), digest_size=8).hexdigest()
    return {
        # Its name, unless that is its place among all.
        **({"cache": name} if "." in name else {}),
        "fingerprint": cache.fingerprint,
        "model": _model_of(name, group, model),
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
    here, there = _names(mine), _names(theirs)
    differences = list[tuple[str, object, object]]()
    if here != there:
        if any("cache" in facts for facts in (*mine, *theirs)):
            differences.append(("caches", _listed(here, mine), _listed(there, theirs)))
        else:
            differences.append(("groups", len(mine), len(theirs)))
    pairs = zip(here, there, mine, theirs, strict=False)
    for name, _, ours, other in (pair for pair in pairs if pair[0] == pair[1]):
        fields = [field for field in ours if field not in _NOT_COMPARED and ours[field] != other.get(field)]
        # It says only that something differs, which the others say better.
        if len(fields) > 1 and "fingerprint" in fields:
            fields.remove("fingerprint")
        differences += [(f"{field} of group {name}", *_apart(ours[field], other.get(field))) for field in fields]
    if differences:
        text = ", ".join(f"{name} is `{ours}` here and `{shown(other)}` there" for name, ours, other in differences)
        raise LayoutError(
            f"the caches of {whose} do not fit: {text}",
            operation=_OPERATION,
            context={name: f"{ours} here, {shown(other)} there" for name, ours, other in differences},
            hint="start both ends with the same model, dtype, block size, parallel sizes and cache groups",
        )


def _names(caches: Sequence[GroupFacts]) -> list[str]:
    return [str(facts.get("cache", index)) for index, facts in enumerate(caches)]


def _listed(names: Sequence[str], caches: Sequence[GroupFacts]) -> str:
    """The caches in a few words each."""
    return ", ".join(
        f"{name}: {facts.get('layers')} x {facts.get('content_bytes')} bytes {facts.get('dtype')}"
        for name, facts in zip(names, caches, strict=True)
    )


def _apart(ours: object, other: object) -> tuple[object, object]:
    """Two values that differ, texts from shortly before where they do: a message shows the beginning only."""
    if not (isinstance(ours, str) and isinstance(other, str)):
        return ours, other
    same = next((at for at, (a, b) in enumerate(zip(ours, other, strict=False)) if a != b), min(len(ours), len(other)))
    start = same - _BEFORE
    return (ours, other) if start <= 0 else (f"...{ours[start:]}", f"...{other[start:]}")


def _model_of(name: str, group: GroupCache, model: str) -> str:
    return f"{group.model or model}#{name}"
