"""The settings of a `PdkvPipe`: the keys of vLLM 0.8's `KVTransferConfig`, from an object, a dict or JSON.

Knows no engine and opens nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pdkv.errors import ConfigError

__all__ = ["PipeConfig"]

_OPERATION = "pipe config"
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
# What the pipe itself takes out of `kv_connector_extra_config`; connectors keep keys of their own there.
_STORE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class PipeConfig:
    """What the two ends of a pipe have in common, and which of the two this is.

    Names, meanings and defaults are those of `KVTransferConfig` in vLLM 0.8.5 (`vllm/config.py`).

    Attributes:
        kv_connector: The connector's name; the pipe makes no use of it.
        kv_buffer_device: Where received tensors land: `"cuda"` or `"cpu"`. On a machine without CUDA `"cuda"` means
            `"cpu"`, which is logged.
        kv_buffer_size: Bytes that may wait in `send_tensor` before the next call blocks.
        kv_role: `"kv_producer"`, `"kv_consumer"` or `"kv_both"`.
        kv_rank: 0 listens, 1 connects.
        kv_parallel_size: Ends of the pipe, 2.
        kv_ip: Where rank 0 listens.
        kv_port: Where rank 0 listens; `port_offset` of the pipe is added.
        kv_connector_extra_config: Of these the pipe uses `store_timeout` (seconds to wait for the peer, 300),
            `transports` (a list for `pdkv.Engine`), `threads`, and `insecure` (`true` to listen beyond loopback).
    """

    kv_connector: str | None = None
    kv_buffer_device: str = "cuda"
    kv_buffer_size: float = 1e9
    kv_role: str | None = None
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ConfigError: One is bad; names it and what is accepted.
        """
        if self.kv_role is not None and self.kv_role not in _ROLES:
            raise _bad("kv_role", self.kv_role, f"accepted are {', '.join(f'`{role}`' for role in _ROLES)}")
        if not _is_text(self.kv_buffer_device) or self.kv_buffer_device.split(":")[0] not in ("cuda", "cpu"):
            raise _bad("kv_buffer_device", self.kv_buffer_device, "accepted are `cuda` and `cpu`")
        if not _is_number(self.kv_buffer_size) or not self.kv_buffer_size > 0:
            raise _bad("kv_buffer_size", self.kv_buffer_size, "give a number of bytes above 0")
        if self.kv_rank is not None and (not _is_int(self.kv_rank) or self.kv_rank < 0):
            raise _bad("kv_rank", self.kv_rank, "give 0 or 1")
        if not _is_int(self.kv_parallel_size) or self.kv_parallel_size < 1:
            raise _bad("kv_parallel_size", self.kv_parallel_size, "give 2")
        if not _is_text(self.kv_ip):
            raise _bad("kv_ip", self.kv_ip, "give the address on which rank 0 listens")
        if not _is_int(self.kv_port) or not 0 < self.kv_port < 1 << 16:
            raise _bad("kv_port", self.kv_port, "give a port between 1 and 65535")
        if not isinstance(self.kv_connector_extra_config, Mapping):
            raise _bad("kv_connector_extra_config", self.kv_connector_extra_config, "give a mapping")
        object.__setattr__(self, "kv_connector_extra_config", dict(self.kv_connector_extra_config))
        timeout_s = self.store_timeout_s
        if not _is_number(timeout_s) or not timeout_s > 0:
            raise _bad("store_timeout", timeout_s, "give a number of seconds above 0")

    @classmethod
    def from_cli(cls, text: str) -> PipeConfig:
        """Reads the JSON of `--kv-transfer-config`.

        Raises:
            ConfigError: It is no JSON object, or has a key that vLLM 0.8's `KVTransferConfig` does not have.
        """
        try:
            settings = json.loads(text)
        except json.JSONDecodeError as error:
            raise _bad("kv_transfer_config", text, f"give a JSON object ({error})") from error
        return cls.of(settings)

    @classmethod
    def of(cls, config: object) -> PipeConfig:
        """Takes a `PipeConfig`, a mapping of its fields, or any object with them as attributes, such as vLLM's.

        Raises:
            ConfigError: It has a key too many, or a value that is not accepted.
        """
        if isinstance(config, cls):
            return config
        names = [entry.name for entry in fields(cls)]
        if isinstance(config, Mapping):
            unknown = sorted(set(config) - set(names))
            if unknown:
                raise _bad(unknown[0], config[unknown[0]], f"known keys are {', '.join(f'`{name}`' for name in names)}")
            return cls(**config)
        if not hasattr(config, "kv_rank"):
            raise _bad("config", config, "give a `PipeConfig`, a dict of its fields, or vLLM 0.8's `KVTransferConfig`")
        return cls(**{name: getattr(config, name) for name in names if hasattr(config, name)})

    @property
    def store_timeout_s(self) -> float:
        """Seconds to wait for the peer."""
        return self.get_from_extra_config("store_timeout", _STORE_TIMEOUT_S)  # type: ignore[no-any-return]

    @property
    def is_kv_transfer_instance(self) -> bool:
        """Whether a connector and a role are set."""
        return self.kv_connector is not None and self.kv_role is not None

    @property
    def is_kv_producer(self) -> bool:
        """Whether this end sends KV."""
        return self.kv_connector is not None and self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Whether this end receives KV."""
        return self.kv_connector is not None and self.kv_role in ("kv_consumer", "kv_both")

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """A value of `kv_connector_extra_config`, or `default`."""
        return self.kv_connector_extra_config.get(key, default)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _bad(name: str, value: object, hint: str) -> ConfigError:
    return ConfigError(f"`{name}` is `{value}`", operation=_OPERATION, context={name: str(value)}, hint=hint)
