"""pdkv's connector under the name that some routers insist on.

Dynamo and smg look at the *name* of the configured connector and know NIXL's. vLLM takes a class from a module before
it looks among its own, so this one runs in place of NIXL's:

    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_connector_module_path": "pdkv.connectors.compat",
                           "kv_role": "kv_both"}'
"""

from __future__ import annotations

import os
from typing import Any

from pdkv.connectors.vllm import PdkvConnector
from pdkv.errors import ConfigError

__all__ = ["NixlConnector"]


class NixlConnector(PdkvConnector):
    """`PdkvConnector` by another name. It speaks pdkv to its peers, not NIXL.

    Where the user has set neither `host` nor `port`, those of NIXL's side channel hold:
    `VLLM_NIXL_SIDE_CHANNEL_HOST` and `VLLM_NIXL_SIDE_CHANNEL_PORT`. Settings that are NIXL's only are left alone.
    """

    @classmethod
    def _default_settings(cls) -> dict[str, Any]:
        defaults = super()._default_settings()
        host, port = (os.environ.get(f"VLLM_NIXL_SIDE_CHANNEL_{name}") for name in ("HOST", "PORT"))
        if host:
            defaults["host"] = "127.0.0.1" if host == "localhost" else host
        if port:
            if not port.isdecimal():
                raise ConfigError(f"`VLLM_NIXL_SIDE_CHANNEL_PORT` is `{port}`", operation="NixlConnector")
            defaults["port"] = int(port)
        return defaults
