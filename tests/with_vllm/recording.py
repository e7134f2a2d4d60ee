"""`RecordedConnector`: `PdkvConnector` that writes down which of its hooks vLLM calls, in which order, with how much.

A line for each call: who is called, the hook, and how many arguments it got. What a hook calls itself, or its base
class, is no call of vLLM's and left out, and so are questions that change nothing.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from pdkv.connectors.vllm import PdkvConnector

__all__ = ["RecordedConnector"]

QUESTIONS = ("has_", "_", "role", "requires_", "supports_", "prefer_")
HOOKS = {name for cls in (KVConnectorBase_V1, SupportsHMA) for name in vars(cls) if not name.startswith(QUESTIONS)}


class RecordedConnector(PdkvConnector):
    """Writes to the file `recorded` of `kv_connector_extra_config`."""

    _depth = 0

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._side = role.name.lower()
        self._file = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["recorded"])
        super().__init__(vllm_config, role, kv_cache_config)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name not in HOOKS or not callable(value):
            return value

        @functools.wraps(value)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                with self._file.open("a") as file:
                    file.write(json.dumps([self._side, name, len(args) + len(kwargs)]) + "\n")
            self._depth += 1
            try:
                return value(*args, **kwargs)
            finally:
                self._depth -= 1

        return called
