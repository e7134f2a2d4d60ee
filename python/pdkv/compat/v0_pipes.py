"""`MooncakePipe`: pdkv's pipe with the constructor and the configuration file of vLLM 0.8's class of that name.

Of Mooncake's file only the address of the prefill side is of use: that is where the two ends meet. There is no
metadata server and no protocol to name.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdkv.errors import ConfigError
from pdkv.pipe import PdkvPipe, PipeConfig

__all__ = ["MooncakePipe"]

VARIABLE = "MOONCAKE_CONFIG_PATH"
_OPERATION = "mooncake config"


class MooncakePipe(PdkvPipe):
    """A pipe whose ends meet where the JSON file named by `MOONCAKE_CONFIG_PATH` has the prefill side.

    Rank 0 listens at the host and port of `prefill_url`, to which `local_rank` is added as in Mooncake's own pipe.

    Args:
        local_rank: Which worker of this instance this is; also its CUDA device.
        config: As for `PdkvPipe`; `kv_ip` and `kv_port` of it are not used.
        device: As for `PdkvPipe`.

    Raises:
        ConfigError: There is no such file, or it has no `prefill_url` of the form `host:port`.
        As `PdkvPipe`.
    """

    def __init__(self, local_rank: int, config: object, device: str | None = None) -> None:
        host, port = _prefill_address()
        settings = replace(PipeConfig.of(config), kv_ip=host, kv_port=port)
        super().__init__(local_rank, settings, device, port_offset=local_rank)


def _prefill_address() -> tuple[str, int]:
    name = os.environ.get(VARIABLE)
    if not name:
        raise ConfigError(
            f"`{VARIABLE}` is not set",
            operation=_OPERATION,
            hint="let it name Mooncake's JSON file, or use PdkvConnector",
        )
    try:
        settings: Any = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{name}` can't be read: {error}", operation=_OPERATION) from error
    url = settings.get("prefill_url") if isinstance(settings, dict) else None
    host, _, port = url.rpartition(":") if isinstance(url, str) else ("", "", "")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"`prefill_url` in `{name}` is `{url}`", operation=_OPERATION, hint="give `host:port` of the prefill side"
        )
    return host.strip("[]"), int(port)
