"""Where releases of vLLM differ in what they call and what they expect. The only place that asks which one is running.

The table, hook by hook, is in docs/reference/vllm-versions.md.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from pdkv.errors import ConfigError, UnsupportedError

__all__ = [
    "NEWEST",
    "OLDEST",
    "cache_dtype",
    "check",
    "clears_loaded",
    "device_type",
    "hit_source",
    "packing",
    "ranks",
    "release_of",
    "transfer_results",
]

OLDEST = (0, 24)
# The newest that was tried. A later one is not refused.
NEWEST = (0, 33)
# Since this release a failed load is told by its request; before, by its blocks, and only for a model with one group.
_FAILED_BY_REQUEST = (0, 30)
_PAGE = "docs/reference/vllm-versions.md"
_log = logging.getLogger("pdkv.connectors")


def check(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuses what can't be served.

    Raises:
        UnsupportedError: The release is too old, or it can't report a failed load of this model.
        ConfigError: A feature is on that moves the cache's memory.
    """
    import vllm

    release = release_of(getattr(vllm, "__version__", None))
    if release is None:
        _log.warning("pdkv can't tell which release of vLLM this is: 0.24 or later is needed")
    elif release < OLDEST:
        raise UnsupportedError(
            f"this is vLLM `{release[0]}.{release[1]}`, at least `{OLDEST[0]}.{OLDEST[1]}` is needed",
            operation="PdkvConnector",
            hint=f"earlier ones give blocks away while they are being written: {_PAGE}",
        )
    elif release < _FAILED_BY_REQUEST and len(kv_cache_config.kv_cache_groups) > 1:
        raise UnsupportedError(
            f"vLLM `{release[0]}.{release[1]}` can't report a failed load of a model with several KV groups",
            operation="PdkvConnector",
            hint="use vLLM 0.30 or later, or `--disable-hybrid-kv-cache-manager`",
        )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) is True:
        raise ConfigError(
            "`enable_sleep_mode` gives the cache's memory back while others may read it",
            operation="PdkvConnector",
            hint="leave `--enable-sleep-mode` out",
        )
    if getattr(getattr(vllm_config, "cache_config", None), "calculate_kv_scales", False) is True:
        raise ConfigError(
            "`calculate_kv_scales` gives every engine scales of its own, by which others can't read its cache",
            operation="PdkvConnector",
            hint="leave `--calculate-kv-scales` out: the scales are then the checkpoint's, or 1",
        )


def clears_loaded(kv_cache_config: Any) -> bool:
    """Whether vLLM clears new blocks of this model at the beginning of their step though a load is to fill them.

    Such a load must not begin before that. Since 0.32 vLLM asks which groups are loaded, and leaves those alone.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    asks = hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False)) and not asks


def release_of(version: object) -> tuple[int, int] | None:
    """Major and minor number of a version of vLLM; `None` for a build that has none."""
    match = re.match(r"(\d+)\.(\d+)(?!.*dev)", str(version))
    return (int(match[1]), int(match[2])) if match else None


def hit_source() -> Any:
    """What vLLM counts fetched tokens as; `None` before it told sources apart (0.32)."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """What `get_transfer_results` returns, in the releases that call it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)


def ranks() -> dict[str, int]:
    """This worker's ranks."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    return {"tp_rank": get_tensor_model_parallel_rank(), "pp_rank": get_pp_group().rank_in_group}


def device_type() -> str:
    """Kind of the device, in vLLM's word: `cpu`, `cuda`."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def cache_dtype(vllm_config: Any) -> str:
    """What `--kv-cache-dtype` says; `auto` if nothing."""
    return str(getattr(getattr(vllm_config, "cache_config", None), "cache_dtype", None) or "auto")


def packing(kv_cache_config: Any) -> str:
    """Kind of the device and, where kernels pack a block by instruction set, which they use."""
    kind = device_type()
    if kind != "cpu":
        return kind
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    isa = {_cpu_isa(spec) for each in specs for spec in (getattr(each, "kv_cache_specs", None) or {"": each}).values()}
    return f"{kind}({','.join(sorted(isa))})"


def _cpu_isa(spec: Any) -> str:
    """How vLLM's CPU attention packs keys; the processor's kind in releases that do not say."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return str(_get_attn_isa(spec.dtype, spec.block_size, spec.head_size))
    except (ImportError, AttributeError, TypeError):
        import torch

        return str(torch.backends.cpu.get_cpu_capability())
