"""`PdkvPipe`: a pipe with the constructor and the manners of vLLM 0.8's `PyNcclPipe` and `MooncakePipe`.

It makes an engine of its own, meets the other end, and is a `Pipe` from there on.
"""

from __future__ import annotations

import logging
from typing import Any

from pdkv.errors import ConfigError
from pdkv.pipe.config import PipeConfig
from pdkv.pipe.pipe import Pipe
from pdkv.pipe.rendezvous import meet

__all__ = ["PdkvPipe"]

_log = logging.getLogger("pdkv.pipe")


class PdkvPipe(Pipe):
    """A pipe between two processes that know the same configuration, one as `kv_rank` 0 and one as 1.

    Rank 0 listens at `kv_ip:kv_port + port_offset`, rank 1 connects; the constructor returns in both when they have
    met, and waits for that up to `store_timeout` seconds (300). Both may send and receive at once. Beyond loopback
    `"insecure": true` in `kv_connector_extra_config` is needed: the stream is neither encrypted nor authenticated.

    Args:
        local_rank: Which CUDA device of this host is this process's, where tensors land on one.
        config: vLLM 0.8's `KVTransferConfig`, a `PipeConfig`, or a dict of its fields.
        device: `"cpu"` or `"cuda"`; `None` takes `kv_buffer_device` of the configuration.
        port_offset: Added to `kv_port`; each pipe between the same two processes has its own.

    Raises:
        ConfigError: The settings can't be, or the two ends disagree.
        PeerUnreachableError: The other end did not come in time.
        HandshakeError: Somebody else came.
    """

    def __init__(self, local_rank: int, config: object, device: str | None = None, port_offset: int = 0) -> None:
        settings = PipeConfig.of(config)
        place = device_of(device or settings.kv_buffer_device, local_rank)
        engine, peer = meet(settings, settings.kv_port + port_offset)
        self.config, self.local_rank, self.kv_rank = settings, local_rank, settings.kv_rank
        try:
            super().__init__(
                engine,
                peer,
                buffer_bytes=max(1, int(settings.kv_buffer_size)),
                device=place,
                timeout_s=settings.store_timeout_s,
            )
            # The other end makes its half now, too.
            self._await_other_half()
        except BaseException:
            engine.close()
            raise

    def abort(self) -> None:
        """Ends both directions at once, and the engine with them."""
        super().abort()
        self._engine.close()


def device_of(name: Any, local_rank: int) -> str:
    if name == "cpu":
        return "cpu"
    if not isinstance(name, str) or name.split(":")[0] != "cuda":
        raise ConfigError(f"`device` is `{name}`", operation="pipe", hint="accepted are `cpu` and `cuda`")
    try:
        import torch
    except ModuleNotFoundError:
        available = False
    else:
        available = torch.cuda.is_available()
    if not available:
        _log.warning("there is no CUDA here: what the pipe receives lands in host memory")
        return "cpu"
    return name if ":" in name else f"cuda:{local_rank}"
