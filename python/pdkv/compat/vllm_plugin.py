"""What vLLM calls when it starts: the entry point `pdkv` of its group `vllm.general_plugins`.

Decides by vLLM's release which connector is registered under the name `PdkvConnector`. Imports no other part of vLLM,
and does nothing where there is none to register.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Registers what fits the vLLM that is running. Calling it twice is no error."""
    from pdkv.compat.vllm_v0 import fits, register

    if fits():
        register()
