"""vLLM's KV cache tensors as groups that pdkv can register, and what their bytes mean.

Reads vLLM's specifications and the tensors' shapes and strides; moves nothing and registers nothing. Where a block of
a layer is one stretch of memory and the axes are not plain (kernel blocks smaller than vLLM's, quantised content), it
is taken as opaque bytes: both ends run the same model with the same layout, which the fingerprint sees to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdkv.connectors.core.caches import GroupCache
from pdkv.engine import Shard
from pdkv.errors import LayoutError, UnsupportedError

__all__ = ["block_tokens", "group_caches", "meaning", "transfer_groups"]

_OPERATION = "register_kv_caches"
# From here on the C library maps every allocation by itself and unmaps it when it is freed: its threshold grows to
# 32 MiB at most.
_OWN_MAPPING_BYTES = 32 << 20


def transfer_groups(kv_cache_config: Any) -> list[tuple[int, Any]]:
    """The KV groups that are moved, each with its place among all groups. Before vLLM 0.30 all of them are."""
    groups = list(enumerate(kv_cache_config.kv_cache_groups))
    return [(index, group) for index, group in groups if getattr(group, "enable_kv_transfer", True)]


def block_tokens(kv_cache_config: Any) -> list[int]:
    """For each group that is moved, tokens in a block of the scheduler's.

    Raises:
        UnsupportedError: A group holds states instead of keys and values.
    """
    tokens = []
    for _, group in transfer_groups(kv_cache_config):
        spec = group.kv_cache_spec
        if "Mamba" in type(spec).__name__:
            raise UnsupportedError(
                f"layers `{list(group.layer_names)[:1]}` keep states of a `{type(spec).__name__}`, not keys and values",
                operation=_OPERATION,
                hint="pdkv moves attention caches only; use a connector that moves states for this model",
            )
        tokens.append(int(spec.block_size))
    return tokens


def group_caches(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, *, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int
) -> list[GroupCache]:
    """Sorts a worker's tensors into groups.

    Args:
        kv_caches: Layer name to tensor, as vLLM registers them. Layers without a specification share another's memory
            and are left out.
        kv_cache_config: vLLM's.
        tp_rank: This worker's place among those that share the heads.
        tp_size: How many do.
        pp_rank: Its place among those that share the layers.
        pp_size: How many do.

    Raises:
        LayoutError: A group's tensors differ, or their blocks lie in pieces that pdkv can't name.
        UnsupportedError: They are no tensors.
    """
    groups = []
    for _, group in transfer_groups(kv_cache_config):
        tensors = {name: kv_caches[name] for name in group.layer_names if name in kv_caches}
        for name, tensor in tensors.items():
            if not hasattr(tensor, "data_ptr"):
                raise UnsupportedError(
                    f"layer `{name}` is a `{type(tensor).__name__}`, not a tensor",
                    operation=_OPERATION,
                    hint="pdkv moves attention caches only",
                )
        tokens = int(group.kv_cache_spec.block_size)
        axes = _axes(next(iter(tensors.values())), kv_cache_config.num_blocks, tokens)
        if axes is None:
            tensors = {name: _opaque(name, tensor, kv_cache_config.num_blocks) for name, tensor in tensors.items()}
            axes = "BC"
        heads = next(iter(tensors.values())).shape[axes.index("H")] if "H" in axes else 1
        shard = Shard(
            len(tensors),
            heads,
            first_head=tp_rank * heads,
            total_heads=tp_size * heads,
            first_layer=pp_rank * len(tensors),
            total_layers=pp_size * len(tensors),
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
        )
        adopt = all(map(_has_own_mapping, tensors.values()))
        groups.append(GroupCache(tensors, axes, tokens, shard, adopt=adopt))
    return groups


def _has_own_mapping(tensor: Any) -> bool:
    """Whether it is memory of the CPU whose pages nobody else gets when the tensor is gone: such may be adopted."""
    return bool(getattr(tensor, "is_cpu", False)) and tensor.untyped_storage().nbytes() >= _OWN_MAPPING_BYTES


def meaning(model: str, kv_cache_config: Any, device: str, kv_caches: Mapping[str, Any]) -> str:
    """One line for what the bytes of all groups mean, equal where caches can be exchanged.

    Args:
        model: Name of the weights.
        kv_cache_config: vLLM's.
        device: Kind of the device, and whatever else decides how a kernel packs a block.
        kv_caches: Layer name to tensor. Of groups that are taken as bytes, the order of the bytes is part of it.
    """
    groups = []
    for _, group in transfer_groups(kv_cache_config):
        spec = group.kv_cache_spec
        tensor = next((kv_caches[name] for name in group.layer_names if name in kv_caches), None)
        opaque = tensor is not None and _axes(tensor, kv_cache_config.num_blocks, int(spec.block_size)) is None
        groups.append(_facts(spec) + (_order(tensor) if opaque else ""))
    return f"{model}|{device}|{';'.join(groups)}"


def _order(tensor: Any) -> str:
    """Shape of a kernel's block, and its axes from the largest stride to the smallest."""
    strides = tensor.stride()[1:]
    return f"{list(tensor.shape[1:])}@{sorted(range(len(strides)), key=lambda axis: -strides[axis])}"


def _facts(spec: Any) -> str:
    names = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "sliding_window", "kv_quant_mode")
    facts = [f"{name}={getattr(spec, name)}" for name in names if getattr(spec, name, None) is not None]
    return f"{type(spec).__name__}({','.join(facts)})"


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
