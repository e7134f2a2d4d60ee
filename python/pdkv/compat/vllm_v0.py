"""vLLM 0.8's first disaggregated prefill ("V0") on pdkv: its own connector with other pipes, or a connector of ours.

`install()` puts pdkv's pipe and buffer where vLLM's `SimpleConnector` looks for its own, so that `PyNcclConnector` and
`MooncakeConnector` in a configuration mean pdkv. `register()` adds `PdkvConnector` beside them, as the plugin does when
vLLM starts. vLLM is imported when one of these is called. The transfer itself is elsewhere: `pdkv.pipe`,
`pdkv.lookup_buffer`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from importlib import import_module
from types import ModuleType
from typing import Any

from pdkv.errors import UnsupportedError

__all__ = ["PdkvConnector", "fits", "install", "register", "uninstall"]  # noqa: F822 - the first is made on demand

NAME = "PdkvConnector"

_RELEASE = "0.8."
_lock = threading.Lock()
# What was replaced: where, under which name, by what of ours, and what was there.
_replaced: list[tuple[Any, str, object, object]] = []


def fits() -> bool:
    """Whether vLLM is installed here, in a release that this module is for."""
    return (_version() or "").startswith(_RELEASE)


def install() -> None:
    """Makes vLLM's `PyNcclConnector` and `MooncakeConnector` use pdkv's pipe and lookup buffer.

    Call it in every process of vLLM before the connector is made. Connectors that exist keep what they have. Calling it
    twice is no error.

    Raises:
        UnsupportedError: There is no vLLM, or it isn't 0.8; nothing was replaced.
    """
    with _lock:
        if _replaced:
            return
        for place, name, ours in _substitutes():
            _replaced.append((place, name, ours, getattr(place, name)))
            setattr(place, name, ours)


def uninstall() -> None:
    """Puts vLLM's own classes back. Does nothing where none were replaced, or somebody else has replaced them since."""
    with _lock:
        while _replaced:
            place, name, ours, theirs = _replaced.pop()
            if getattr(place, name) is ours:
                setattr(place, name, theirs)


def register() -> None:
    """Lets `"kv_connector": "PdkvConnector"` name pdkv's connector. Calling it twice is no error.

    Raises:
        UnsupportedError: There is no vLLM, or it isn't 0.8.
    """
    factory = _module("kv_connector.factory").KVConnectorFactory
    with contextlib.suppress(ValueError):  # the name is known already
        factory.register_connector(NAME, __name__, NAME)


def __getattr__(name: str) -> object:
    """Makes the class `PdkvConnector` when it is asked for: its base is vLLM's.

    Raises:
        UnsupportedError: There is no vLLM, or it isn't 0.8.
    """
    if name == NAME:
        return _connector()
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


@functools.cache
def _connector() -> type:
    from pdkv.compat.v0_connector import V0Connector

    theirs = _module("kv_connector.simple_connector").SimpleConnector
    return type(NAME, (V0Connector, theirs), {"__doc__": V0Connector.__doc__, "__module__": __name__})


def _substitutes() -> list[tuple[Any, str, object]]:
    """Where vLLM's connector takes its parts from, under which names, and ours."""
    connector = _module("kv_connector.simple_connector")
    pynccl = _module("kv_pipe.pynccl_pipe")

    from pdkv.compat.v0_connector import close_what_is_there
    from pdkv.compat.v0_pipes import MooncakePipe
    from pdkv.lookup_buffer import SimpleBuffer
    from pdkv.pipe import BrokenPipeException, PdkvPipe

    return [
        (pynccl, "PyNcclPipe", PdkvPipe),
        (pynccl, "BrokenPipeException", BrokenPipeException),
        (_module("kv_pipe.mooncake_pipe"), "MooncakePipe", MooncakePipe),
        (_module("kv_lookup_buffer.simple_buffer"), "SimpleBuffer", SimpleBuffer),
        (connector, "SimpleBuffer", SimpleBuffer),
        # vLLM's closes the pipes of both sides, of which every connector has one.
        (connector.SimpleConnector, "close", close_what_is_there),
    ]


def _module(name: str) -> ModuleType:
    version = _version()
    if version is None:
        raise UnsupportedError(
            "vLLM is not installed", operation="vllm_v0", hint="this is for vLLM 0.8: `pip install vllm==0.8.5`"
        )
    if not version.startswith(_RELEASE):
        raise UnsupportedError(
            f"vLLM is `{version}`, and the connectors of `0.8` are not in it",
            operation="vllm_v0",
            context={"version": version},
            hint="with this release give vLLM a connector of its V1 engine",
        )
    try:
        return import_module(f"vllm.distributed.kv_transfer.{name}")
    except ImportError as error:
        raise UnsupportedError(
            f"vLLM `{version}` can't import its `{name}`: {error}",
            operation="vllm_v0",
            context={"version": version, "module": name},
            hint="install what vLLM requires; `pip check` lists what is missing",
        ) from error


def _version() -> str | None:
    try:
        from vllm.version import __version__
    except ImportError:
        return None
    return str(__version__)
