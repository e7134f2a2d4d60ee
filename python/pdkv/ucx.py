"""Settings of the `ucx` transport. Loads no UCX: the engine does, when it first needs one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdkv.errors import ConfigError

__all__ = ["UcxConfig"]

_POLICIES = ("rdma", "kernel", "any", "never")
_OPERATION = "ucx config"


@dataclass(frozen=True)
class UcxConfig:
    """Settings of the `ucx` transport, for `pdkv.Engine(ucx=...)`. A bad one refuses the start.

    Attributes:
        library: Path of the `libucp` to load, or of the folder that holds it; nothing else is tried then. The
            default `None` takes what the environment variable `PDKV_UCX_LIBRARY` names, or else searches: a copy in
            this process, the system's, a NIXL wheel's, the `libucx` wheel's. Costs nothing until UCX is needed.
        one_sided: Over what a peer may put and get in this engine's memory without this engine's doing. Both
            ends must agree; what is not allowed goes by active messages, which the receiver places itself and
            which cost a copy at each end. `"rdma"`, the default: only where a network adapter carries it.
            `"kernel"`: also where the kernel of this host does. `"any"`: also where UCX emulates it, for tests.
            `"never"`: nowhere. Where any is allowed and happens, a hostile engine that this one connects to can
            write anywhere in this process, with `"kernel"` and `"any"` one that connects to it too, and every
            lane trusts the peer's UCX: docs/guides/ucx.md says in what.
        settings: UCX's own settings by name, without the `UCX_` in front, such as `{"TLS": "rc,self"}`. They
            win over the environment, which wins over pdkv's defaults. A name that the loaded UCX does not know
            is refused when it is loaded. None by default.
    """

    library: str | os.PathLike[str] | None = None
    one_sided: str = "rdma"
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ConfigError: One is bad; names it and what is accepted.
        """
        if not (self.library is None or _is_path(self.library)):
            raise _bad(
                "library", self.library, "give the path of a `libucp.so.0` or of its folder, or `None` to search"
            )
        if self.one_sided not in _POLICIES:
            raise _bad("one_sided", self.one_sided, f"accepted are {', '.join(f'`{name}`' for name in _POLICIES)}")
        if not _is_mapping(self.settings):
            raise _bad("settings", self.settings, 'give names and values, such as `{"TLS": "rc,self"}`')
        for name, value in self.settings.items():
            if not _is_text(name) or not name or "=" in name:
                raise _bad("settings", name, "a name is that of a UCX setting, such as `TLS`")
            if name.upper().startswith("UCX_"):
                raise _bad("settings", name, f"leave the prefix out: `{name[4:]}`")
            if not _is_text(value):
                raise _bad(f"settings[{name!r}]", value, "values are strings, as in the environment")
        # Nobody changes them afterwards through the mapping that was given.
        object.__setattr__(self, "settings", dict(self.settings))

    def __hash__(self) -> int:
        """Hashes the values, of which a dict is one."""
        return hash((self.library, self.one_sided, frozenset(self.settings.items())))


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike) and _is_text(os.fspath(value)) and bool(os.fspath(value))


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_text(value: object) -> bool:
    # What the file system or the environment gave undecoded, as surrogates, has no text to hand to UCX.
    return isinstance(value, str) and "\0" not in value and value.isprintable()


def _bad(field_name: str, value: object, hint: str) -> ConfigError:
    shown = ascii(value) if isinstance(value, str) and not value.isprintable() else value
    return ConfigError(f"`{field_name}` is `{shown}`", operation=_OPERATION, hint=hint)
