"""Stands in for the package `vllm` of any supported release, so that the connector can be run without it.

The base classes have the methods that the release's signatures declare, abstract where they are, with the plainest
behaviour that vLLM's have. What a release hasn't, an import doesn't find. Knows nothing of what a scheduler does.
"""

from __future__ import annotations

import abc
import enum
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from connectors.releases import facts, number

# The modules that are other ones with each release.
_REPLACED = ("vllm", "pdkv.connectors.vllm", "pdkv.connectors.compat")
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
# What the base class's hooks return where they are not left to nothing.
_GIVES: dict[str, Any] = {
    "get_finished": (None, None),
    "get_block_ids_with_load_errors": set,
    "request_finished": (False, None),
    "take_events": (),
    "has_pending_push_work": False,
    "has_pending_block_frees": False,
    "prefer_cross_layer_blocks": False,
    "supports_divergent_local_hybrid_hits": False,
    "supports_sleep_mode": True,
    "requires_piecewise_for_cudagraph": False,
}


class Tensor(np.ndarray):
    """Host memory with the few methods of torch's tensors that a connector looks at."""

    def data_ptr(self) -> int:
        return int(self.__array_interface__["data"][0])

    def stride(self, axis: int | None = None) -> Any:
        steps = tuple(step // self.itemsize for step in self.strides)
        return steps if axis is None else steps[axis]

    def element_size(self) -> int:
        return self.itemsize


class Place:
    """Which rank the connector that is being called belongs to, as vLLM's process groups would tell."""

    tp_rank = 0


@contextmanager
def vllm(release: str, device: str = "cpu") -> Iterator[ModuleType]:
    """Puts a stand-in of the release in the place of `vllm`, and gives the connector's module, imported with it.

    Args:
        release: Such as `0.32.0`. One that nothing is known of has the classes of the oldest that is known.
        device: What vLLM's platform would call its device.
    """
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(_REPLACED)}
    sys.modules.update(_modules(release, device))
    try:
        yield importlib.import_module("pdkv.connectors.vllm")
    finally:
        for name in [name for name in sys.modules if name.startswith(_REPLACED)]:
            del sys.modules[name]
        sys.modules.update(before)


def _modules(release: str, device: str) -> dict[str, ModuleType]:
    base = {"KVConnectorRole": _Role, "KVConnectorMetadata": _Metadata, "KVConnectorHandshakeMetadata": _Handshake}
    base["KVConnectorBase_V1"] = _class(release, "KVConnectorBase_V1", _Connector)
    base["SupportsHMA"] = _class(release, "SupportsHMA", _Nothing)
    if "KVConnectorTransferResults" in facts(release)["fields"]:
        base["KVConnectorTransferResults"] = _Results
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": f"{release}+cpu"},
        _BASE: base,
        _METRICS: {"KVConnectorStats": _Stats, "KVConnectorPromMetrics": object},
        "vllm.distributed.parallel_state": {
            "get_pp_group": lambda: SimpleNamespace(rank_in_group=0),
            "get_tensor_model_parallel_rank": lambda: Place.tp_rank,
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type=device)},
        "vllm.v1.attention.backends.cpu_attn": {"_get_attn_isa": lambda *_: "vec"},
    }
    if "get_external_cache_hit_sources" in facts(release)["classes"]["KVConnectorBase_V1"]:
        contents["vllm.v1.metrics.cache_hit_source"] = {"CacheHitSource": SimpleNamespace(P2P="p2p")}
    modules: dict[str, ModuleType] = {}
    for name, content in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            modules.setdefault(path, ModuleType(path)).__dict__.setdefault("__path__", [])
        modules[name].__dict__.update(content)
    return modules


class _Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class _Metadata(abc.ABC):  # noqa: B024 - as vLLM's
    pass


class _Handshake(abc.ABC):  # noqa: B024 - as vLLM's
    pass


class _Nothing:
    pass


@dataclass
class _Results:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class _Stats:
    data: dict[str, Any] = field(default_factory=dict)


class _Connector:
    """The behaviour of vLLM's base class that a connector counts on."""

    def __init__(self, vllm_config: Any, role: _Role, kv_cache_config: Any) -> None:
        self._connector_metadata = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @property
    def role(self) -> _Role:
        return self._role

    @property
    def requires_kv_delivery(self) -> bool:
        return bool(self._kv_transfer_config.is_kv_producer)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata


def _class(release: str, name: str, behaviour: type) -> type:
    """A class with exactly the methods that the release's has."""
    body: dict[str, Any] = {}
    for hook, about in facts(release)["classes"][name].items():
        body[hook] = behaviour.__dict__.get(hook) or _hook(hook, about.get("kind", "method"), "abstract" in about)
    return abc.ABCMeta(name, (), body)


def _hook(name: str, kind: str, is_abstract: bool) -> Any:
    def hook(*_args: Any, **_kwargs: Any) -> Any:
        gives = _GIVES.get(name)
        return gives() if isinstance(gives, type) else gives

    wrapped: Any = abc.abstractmethod(hook) if is_abstract else hook
    wraps: dict[str, Any] = {"classmethod": classmethod, "staticmethod": staticmethod, "property": property}
    return wraps.get(kind, lambda function: function)(wrapped)


def has(release: str, since: str) -> bool:
    """Whether a release is as new as another."""
    return number(release) >= number(since)
