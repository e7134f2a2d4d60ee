"""vLLM's KV groups as caches that pdkv can register, and what their bytes mean.

Reads vLLM's specifications; moves nothing and registers nothing. Layers of one group share block ids, whatever they
are; those that are alike become one cache. How a single layer is registered is in `vllm_layouts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from pdkv.connectors.core.caches import GroupCache
from pdkv.connectors.vllm_layouts import Form, form_of
from pdkv.engine import Shard
from pdkv.errors import LayoutError, UnsupportedError

__all__ = ["block_tokens", "group_caches", "transfer_groups"]

_OPERATION = "register_kv_caches"
# From here on the C library maps every allocation by itself and unmaps it when it is freed: its threshold grows to
# 32 MiB at most.
_OWN_MAPPING_BYTES = 32 << 20
# Specifications whose blocks are not those of a prompt's tokens, one after another, and what they hold instead.
_NOT_MOVED = {
    "MambaSpec": "states, not keys and values",
    "CircularBufferSpec": "what awaits its compression, in one block for each request",
    "CrossAttentionSpec": "keys and values of an encoder's input, not of the prompt",
    "HiSparseHotSpec": "copies of what lies elsewhere",
    "HiSparseResidentSpec": "copies of what lies elsewhere",
}
_FACTS = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "sliding_window", "kv_quant_mode")
# Those by which layers of one group may differ beyond these.
_MORE_FACTS = (*_FACTS, "cache_dtype_str", "state_content_bytes", "tokens_per_state", "cache_role", "model_version")
# What `--kv-cache-dtype` says that the elements' type says as well.
_SAID_BY_DTYPE = frozenset({"auto", "half", "float", "float16", "bfloat16", "float32"})
# The longest text that peers and directories tell one another, less a cache's name.
_LONGEST = 1000


@dataclass(frozen=True)
class _Layer:
    name: str
    spec: Any
    form: Form


def transfer_groups(kv_cache_config: Any) -> list[tuple[int, Any]]:
    """The KV groups that are moved, each with its place among all groups. Before vLLM 0.30 all of them are."""
    groups = list(enumerate(kv_cache_config.kv_cache_groups))
    return [(index, group) for index, group in groups if getattr(group, "enable_kv_transfer", True)]


def block_tokens(kv_cache_config: Any) -> list[int]:
    """For each group that is moved, tokens in a block of the scheduler's.

    Raises:
        UnsupportedError: A group's blocks are not those of a prompt's tokens.
    """
    tokens = []
    for _, group in transfer_groups(kv_cache_config):
        for spec in _specs(group).values():
            _check(group, spec)
        tokens.append(int(group.kv_cache_spec.block_size))
    return tokens


def group_caches(
    kv_caches: Mapping[str, Any],
    kv_cache_config: Any,
    *,
    model: str = "",
    device: str = "",
    cache_dtype: str | None = None,
    tp_rank: int,
    tp_size: int,
    pp_rank: int,
    pp_size: int,
) -> list[GroupCache]:
    """Sorts a worker's tensors into caches.

    Args:
        kv_caches: Layer name to tensor, as vLLM registers them. Layers without a specification share another's memory
            and are left out.
        kv_cache_config: vLLM's.
        model: Name of the weights.
        device: Kind of the device, and whatever else decides how a kernel packs a block.
        cache_dtype: vLLM's `--kv-cache-dtype`.
        tp_rank: This worker's place among those that share the heads.
        tp_size: How many do.
        pp_rank: Its place among those that share the layers.
        pp_size: How many do.

    Returns:
        The caches, group by group. A group of which this worker has no layers has none.

    Raises:
        LayoutError: A layer has no tensor, or its blocks lie in pieces that pdkv can't name.
        UnsupportedError: They are no tensors, or there are none.
    """
    groups = [group for _, group in transfer_groups(kv_cache_config)]
    cache_dtype = cache_dtype or "auto"
    layers = [list(_layers(group, kv_caches, kv_cache_config.num_blocks, cache_dtype)) for group in groups]
    caches = list[GroupCache]()
    contents = list[list[_Layer]]()
    for index, group in enumerate(groups):
        for alike in _alike(layers[index]):
            heads = alike[0].form.heads
            views = {layer.name: layer.form.view for layer in alike}
            shard = Shard(
                len(alike),
                heads,
                first_head=tp_rank * heads,
                total_heads=tp_size * heads,
                first_layer=pp_rank * len(alike),
                total_layers=pp_size * len(alike),
                tp_rank=tp_rank,
                tp_size=tp_size,
                pp_rank=pp_rank,
                pp_size=pp_size,
            )
            adopt = all(map(_has_own_mapping, views.values()))
            tokens = int(group.kv_cache_spec.block_size)
            caches.append(GroupCache(views, alike[0].form.axes, tokens, shard, adopt, index))
            contents.append(alike)
    if not caches:
        raise UnsupportedError(
            "this worker has no layer with a KV cache",
            operation=_OPERATION,
            hint="every rank needs one: use fewer pipeline stages, or no connector for a model without attention",
        )
    about = f"{model}|{device}" if cache_dtype in _SAID_BY_DTYPE else f"{model}|{device}|{_full_name(cache_dtype)}"
    meanings = _meanings(about, groups, contents)
    return [replace(cache, model=meaning) for cache, meaning in zip(caches, meanings, strict=True)]


def _layers(group: Any, kv_caches: Mapping[str, Any], num_blocks: int, cache_dtype: str) -> Iterator[_Layer]:
    """The layers of a group, each with memory of its own."""
    seen = set[tuple[int, ...]]()
    for name, spec in _specs(group).items():
        _check(group, spec)
        if name not in kv_caches:
            raise LayoutError(f"vLLM gave no tensor for layer `{name}`", operation=_OPERATION)
        tensor = kv_caches[name]
        if not hasattr(tensor, "data_ptr"):
            raise UnsupportedError(
                f"layer `{name}` is a `{type(tensor).__name__}`, not a tensor",
                operation=_OPERATION,
                hint="pdkv moves attention caches only",
            )
        memory = (tensor.data_ptr(), *tensor.shape, *tensor.stride())
        if memory not in seen:  # else the layer shares that of another
            seen.add(memory)
            yield _Layer(name, spec, form_of(name, tensor, spec, num_blocks, cache_dtype))


def _specs(group: Any) -> dict[str, Any]:
    """The specification of each layer: a group's own, unless its layers have several."""
    by_layer: Mapping[str, Any] | None = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if by_layer is None:
        return dict.fromkeys(group.layer_names, group.kv_cache_spec)
    return {name: by_layer[name] for name in group.layer_names if name in by_layer}


def _check(group: Any, spec: Any) -> None:
    """Refuses what pdkv can't move.

    Raises:
        UnsupportedError: The blocks are not those of a prompt's tokens, or lie elsewhere.
    """
    layers = f"layers `{list(group.layer_names)[:1]}`"
    for kind in type(spec).__mro__:
        name = "MambaSpec" if "Mamba" in kind.__name__ else kind.__name__
        if name in _NOT_MOVED:
            raise UnsupportedError(
                f"{layers} keep {_NOT_MOVED[name]}: their specification is a `{type(spec).__name__}`",
                operation=_OPERATION,
                hint="pdkv moves attention caches only; use a connector that moves these for this model",
            )
    if getattr(group, "host_resident", False) is True:
        raise UnsupportedError(
            f"{layers} lie in a pool of the host's with block ids of its own",
            operation=_OPERATION,
            hint="leave HiSparse out",
        )


def _alike(layers: Sequence[_Layer]) -> list[list[_Layer]]:
    """The layers that one cache can hold, in the order of the first of each."""
    kinds = dict[tuple[object, ...], list[_Layer]]()
    for layer in layers:
        kinds.setdefault(layer.form.kind, []).append(layer)
    return list(kinds.values())


def _has_own_mapping(tensor: Any) -> bool:
    """Whether it is memory of the CPU whose pages nobody else gets when the tensor is gone: such may be adopted."""
    return bool(getattr(tensor, "is_cpu", False)) and tensor.untyped_storage().nbytes() >= _OWN_MAPPING_BYTES


def _meanings(about: str, groups: Sequence[Any], caches: Sequence[Sequence[_Layer]]) -> list[str]:
    """For each cache one line for what its bytes mean, equal where they can be exchanged."""
    if len(caches) == len(groups) and not any(hasattr(group.kv_cache_spec, "kv_cache_specs") for group in groups):
        # What each group has is said of all of them, as earlier releases do, with which these caches can be exchanged.
        facts = (
            _facts(group.kv_cache_spec, _FACTS) + cache[0].form.order
            for group, cache in zip(groups, caches, strict=True)
        )
        text = f"{about}|{';'.join(facts)}"
        if len(text) <= _LONGEST:
            return [text] * len(caches)
    meanings = []
    for cache in caches:
        kinds = Counter(_facts(layer.spec, _MORE_FACTS) + layer.form.order for layer in cache)
        text = f"{about}|{';'.join(f'{number} x {kind}' for kind, number in kinds.items())}"
        if len(text) > _LONGEST:
            digest = blake2b(text.encode(), digest_size=16).hexdigest()
            text = f"{text[: _LONGEST - len(digest) - 3]}...{digest}"
        meanings.append(text)
    return meanings


def _full_name(cache_dtype: str) -> str:
    return "fp8_e4m3" if cache_dtype == "fp8" else cache_dtype


def _facts(spec: Any, names: Sequence[str]) -> str:
    facts = [f"{name}={getattr(spec, name)}" for name in names if getattr(spec, name, None) is not None]
    return f"{type(spec).__name__}({','.join(facts)})"
