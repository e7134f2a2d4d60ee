"""How UCX is to be used in a case: its transports, who may write by itself, the window, which copy. Pure.

The same choice holds for pdkv's `ucx` transport, the loops that limit it, `ucx_perftest` and `ucxx`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError

ONE_SIDED = ("rdma", "kernel", "any", "never")
WINDOW = 128
_MAX_WINDOW = 1 << 16


@dataclass(frozen=True, slots=True)
class Ucx:
    """The choice. An empty text leaves it to UCX, or to the search for a copy.

    Attributes:
        tls: Transports, as in `UCX_TLS`: `posix,cma`, `tcp`, `rc`.
        one_sided: When puts and gets are allowed, as `pdkv.UcxConfig` has it.
        window: Operations under way at once, of the loops and of `ucx_perftest`.
        library: Path of the `libucp` to use.
    """

    tls: str = ""
    one_sided: str = ONE_SIDED[0]
    window: int = WINDOW
    library: str = ""

    def __post_init__(self) -> None:
        if self.one_sided not in ONE_SIDED:
            raise ConfigError(
                f"`{self.one_sided}` does not say when UCX may put and get", hint=f"use one of {', '.join(ONE_SIDED)}"
            )
        if not 1 <= self.window <= _MAX_WINDOW:
            raise ConfigError(f"`{self.window}` operations under way, between 1 and {_MAX_WINDOW} are possible")

    @property
    def settings(self) -> dict[str, str]:
        """Gives UCX's settings, without their prefix."""
        return {"TLS": self.tls} if self.tls else {}

    @property
    def path(self) -> Path | None:
        """Gives the library that was asked for."""
        return Path(self.library) if self.library else None

    def engine_options(self, pdkv: Any) -> dict[str, Any]:
        """Gives what `pdkv.Engine` needs to take the transport although there may be no RDMA device."""
        config = pdkv.UcxConfig(library=self.library or None, one_sided=self.one_sided, settings=self.settings)
        return {"transports": ["ucx"], "ucx": config}
