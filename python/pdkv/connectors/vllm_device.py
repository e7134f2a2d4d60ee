"""The GPU of a vLLM worker: in which order its work is done, and how its cache must be allocated to be shared.

Imports torch when it is asked for a GPU. Moves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.device import KEPT
from pdkv.errors import ConfigError, UnsupportedError

__all__ = ["Gpu", "device_of", "shareable_memory", "with_buffer_device"]

_OPERATION = "register_kv_caches"


class Gpu:
    """A GPU that torch works on, as `pdkv.connectors.core.device.Device`.

    Only events that nobody waits for are put between vLLM's steps, outside of its CUDA graphs.

    Args:
        index: Its number, as torch counts.
    """

    def __init__(self, index: int) -> None:
        import torch

        self._index = index
        self._cuda: Any = torch.cuda
        self._events = [self._cuda.Event() for _ in range(KEPT + 1)]
        self._next = 0
        self._stream: Any = None

    @property
    def stream(self) -> Any:
        """The stream that vLLM's thread puts its steps on, for whichever thread asks: each has a current one."""
        return self._stream

    def mark(self) -> Any:
        """An event behind everything that the calling thread has put on its stream so far."""
        event = self._events[self._next]
        self._next = (self._next + 1) % len(self._events)
        self._stream = self._cuda.current_stream(self._index)
        event.record(self._stream)
        return event


def device_of(kv_caches: Mapping[str, Any]) -> Gpu | None:
    """Where a worker's cache is: a GPU, or `None` for the CPU's memory.

    Raises:
        UnsupportedError: It is elsewhere, or in several places.
    """
    places = {str(getattr(tensor, "device", "cpu")) for tensor in kv_caches.values()}
    if places <= {"cpu"}:
        return None
    kind, _, index = min(places).partition(":")
    if len(places) > 1 or kind != "cuda":
        named = ", ".join(f"`{place}`" for place in sorted(places))
        raise UnsupportedError(
            f"the KV cache is on {named}",
            operation=_OPERATION,
            hint="pdkv moves caches in the CPU's memory and on one CUDA GPU for each rank",
        )
    import torch

    if getattr(torch.version, "hip", None):
        raise UnsupportedError(
            "the KV cache is on a GPU of AMD's", operation=_OPERATION, hint="pdkv moves caches of CUDA GPUs"
        )
    return Gpu(int(index or 0))


def with_buffer_device(settings: Settings, wanted: str | None, device_type: str) -> Settings:
    """The settings with `kv_buffer_device` of vLLM's configuration in them.

    As with NIXL's connector, `cpu` for a cache on a GPU means that its bytes go through the CPU's memory; here through
    a few pinned buffers instead of a mirror of the whole cache.

    Args:
        settings: What the user set for pdkv.
        wanted: What the user set for vLLM.
        device_type: Where the cache is, in vLLM's word.

    Raises:
        ConfigError: It names a device that the cache is not on, or contradicts `transports` or `require`.
    """
    if device_type == "cpu" or wanted in (None, device_type):
        return settings
    if wanted != "cpu":
        raise ConfigError(
            f"`kv_buffer_device` is `{wanted}`, and the cache is on `{device_type}`",
            operation="PdkvConnector",
            hint=f"leave it out, or give `{device_type}` or `cpu`",
        )
    direct = {*(settings.transports or ()), settings.require} & {"cuda", "ucx", "rdma"}
    if direct:
        raise ConfigError(
            f"`kv_buffer_device` is `cpu`, but `{min(map(str, direct))}` reads the GPU's memory itself",
            operation="PdkvConnector",
            hint="leave `kv_buffer_device` out, or `transports` and `require`",
        )
    return settings if settings.transports is not None else replace(settings, transports=("tcp",))


def shareable_memory(vllm_config: Any, device_type: str) -> contextlib.AbstractContextManager[None] | None:
    """Where vLLM should allocate its cache, so that other processes of the host can be given it.

    Returns:
        `None` for vLLM's choice. Its own allocator, with `--enable-cumem-allocator`, makes memory that can't be shared,
        so torch's is to be used instead.
    """
    if device_type == "cuda" and getattr(vllm_config.model_config, "enable_cumem_allocator", False) is True:
        return contextlib.nullcontext()
    return None
