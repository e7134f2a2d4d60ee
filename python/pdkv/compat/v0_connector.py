"""What makes pdkv's connector for vLLM 0.8 of vLLM's own: other ends, other waits, and a `close` that closes.

How keys, values and hidden states come out of a paged cache and go into one stays vLLM's (`SimpleConnector`, which is
mixed in below this). This module opens a lookup buffer between the two instances, inserts, and selects. It knows no
tensor's layout and imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

from pdkv.errors import CapacityError, ConfigError, PdkvError, TransferTimeoutError

__all__ = ["V0Connector", "close_what_is_there"]

_log = logging.getLogger("pdkv.vllm")
_TENSORS = 5
# How long a consumer waits for a prompt that is not there, unless it is told; then it computes it itself. Where every
# prompt is asked for and most are computed here, as with `kv_both`, it asks once.
_LOOKUP_S = {"kv_consumer": 60.0, "kv_both": 0.0}
# How long one that closes waits for what it inserted to be taken. Not all of it will be, where both ends insert.
_DRAIN_S = {"kv_producer": 30.0, "kv_both": 0.0}
# The same for vLLM's own connector.
_END_S = 30.0


class V0Connector:
    """pdkv's connector for the V0 engine of vLLM 0.8: `"kv_connector": "PdkvConnector"`.

    The two instances have ranks 0 and 1 and the same `kv_ip` and `kv_port`; worker `rank` of one meets worker `rank` of
    the other at `kv_port + rank`. A `kv_producer` inserts what it prefilled, a `kv_consumer` selects it, a `kv_both`
    does both, towards a peer that does both too. A prompt that is not found in time, or whose producer is gone, is
    computed by the consumer.

    Keys of `kv_connector_extra_config`, beside those of `PdkvPipe`:
        lookup_timeout: Seconds a consumer waits for a prompt: 60, or 0 for `kv_both`, which asks once.
        drain_timeout: Seconds `close` waits until all that was inserted is taken: 30, or 0 for `kv_both`.

    Args:
        rank: This worker's rank in its instance.
        local_rank: Its CUDA device.
        config: vLLM's configuration, of which `kv_transfer_config` is read.

    Raises:
        ConfigError: The settings can't be, or the two instances disagree.
        PeerUnreachableError: The other instance did not come within `store_timeout`.
    """

    # vLLM's constructor makes buffers over these, which nobody uses here, and its `close` looks for all four.
    producer_data_pipe: Any = None
    producer_signal_pipe: Any = None
    consumer_data_pipe: Any = None
    consumer_signal_pipe: Any = None

    producer_buffer: Any
    consumer_buffer: Any

    def __init__(self, rank: int, local_rank: int, config: Any) -> None:
        from pdkv.lookup_buffer import LookupBuffer
        from pdkv.pipe import PipeConfig
        from pdkv.pipe.drop_in import device_of
        from pdkv.pipe.rendezvous import meet

        settings = PipeConfig.of(config.kv_transfer_config)
        role = settings.kv_role or ""
        self._lookup_s = _seconds(settings, "lookup_timeout", _LOOKUP_S.get(role, 0.0))
        self._drain_s = _seconds(settings, "drain_timeout", _DRAIN_S.get(role, 0.0))
        device = device_of(settings.kv_buffer_device, local_rank)
        super().__init__(rank, local_rank, config)  # type: ignore[call-arg] # vLLM's, in the class that is made of this
        self.producer_buffer = self.consumer_buffer = None
        with ExitStack() as opened:
            self._engine, peer = meet(settings, settings.kv_port + rank)
            opened.callback(self._engine.close)
            if settings.is_kv_producer:
                self.producer_buffer = LookupBuffer(self._engine, max_bytes=settings.kv_buffer_size)
                opened.callback(self.producer_buffer.close)
            if settings.is_kv_consumer:
                self.consumer_buffer = LookupBuffer(
                    self._engine, peer, device=device, library="torch", timeout_s=settings.store_timeout_s
                )
            opened.pop_all()

    def insert(self, input_tokens: Any, roi: Any, key: Any, value: Any, hidden: Any) -> None:
        """Adds a prompt; blocks while the consumer has not taken enough of what is there.

        A prompt that is larger than the whole buffer is left out, which is logged; the consumer computes it.
        """
        # Keys and values were gathered for this call. The others are views of what the model runner uses again.
        views = [None if tensor is None else tensor.clone() for tensor in (input_tokens, roi, hidden)]
        try:
            self.producer_buffer.insert(views[0], views[1], key, value, views[2])
        except CapacityError as error:
            _log.error("a prompt of %d tokens is not sent: %s", len(input_tokens), error.message)

    def select(self, input_tokens: Any, roi: Any) -> list[Any]:
        """Takes a prompt: its tokens, mask, keys, values and hidden states, or `None` five times if there is none."""
        try:
            return list(self.consumer_buffer.drop_select(input_tokens, roi, timeout_s=self._lookup_s))
        except TransferTimeoutError as error:
            _log.info("a prompt of %d tokens is computed here: %s", len(input_tokens), error.message)
        except PdkvError as error:
            # An exception in the forward pass would end the engine.
            _log.warning("a prompt of %d tokens could not be received: %s", len(input_tokens), error.message)
        return [None] * _TENSORS

    def close(self) -> None:
        """Ends this side, having waited for what it inserted to be taken, up to `drain_timeout`. Twice is no error.

        Nobody may be in another call.
        """
        with ExitStack() as closing:
            closing.callback(self._engine.close)
            if self.producer_buffer is not None:
                closing.callback(self.producer_buffer.close)
            if self.consumer_buffer is not None:
                closing.callback(self.consumer_buffer.close)
            if self.producer_buffer is not None and self._drain_s > 0:
                self._drain()

    def _drain(self) -> None:
        try:
            self.producer_buffer.drain(self._drain_s)
        except PdkvError as error:
            _log.warning("the consumer has not taken all: %s", error.message)


def close_what_is_there(connector: Any) -> None:
    """`SimpleConnector.close` for one that has only one of its two sides: ends its buffer, then its pipes."""
    with ExitStack() as closing:
        pipes = {
            id(pipe): pipe
            for side in ("producer", "consumer")
            for kind in ("data", "signal")
            if (pipe := getattr(connector, f"{side}_{kind}_pipe", None)) is not None
        }
        for pipe in pipes.values():
            closing.callback(_close, pipe)
        if connector.consumer_buffer is not None:
            closing.callback(connector.consumer_buffer.close)
        if connector.producer_buffer is not None:
            closing.callback(connector.producer_buffer.close, _END_S)


def _close(pipe: Any) -> None:
    """Ends a pipe. That the other end was gone first is no error of whoever ends this one."""
    try:
        pipe.close()
    except PdkvError as error:
        _log.debug("the other end was gone first: %s", error.message)


def _seconds(settings: Any, name: str, default: float) -> float:
    value = settings.get_from_extra_config(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"`{name}` is `{value}`", operation="pdkv connector", hint="give seconds, 0 or more")
    return float(value)
