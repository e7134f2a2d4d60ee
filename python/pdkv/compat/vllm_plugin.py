"""What vLLM calls when it starts: the entry point `pdkv` of its group `vllm.general_plugins`.

Decides by vLLM's release which connector is registered under the name `PdkvConnector`. Imports no other part of vLLM,
and does nothing where there is none to register.
"""

from __future__ import annotations

import contextlib

__all__ = ["register"]


_NAME = "PdkvConnector"


def register() -> None:
    """Registers what fits the vLLM that is running. Calling it twice is no error."""
    from pdkv.compat import vllm_v0

    if vllm_v0.fits():
        vllm_v0.register()
        return
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        return  # a vLLM that has no connectors, or none at all
    # A second call, or one in a process that another plugin has prepared, finds the name taken.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(_NAME, "pdkv.connectors.vllm", _NAME)
