"""The producer's end of the lookup bench: buffers that the consumer selects from, over the public API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdkv.bench import control
from pdkv.bench.control import Channel, Message
from pdkv.bench.lookup.prompts import Prompts
from pdkv.bench.side import Side, Toolkit
from pdkv.errors import ConfigError

NAME = "bench"
# Whatever the prompts hold: what is measured here is not the waiting for room.
ROOM = 1 << 44


class Keeper:
    """Answers requests of the consumer about a buffer of prompts, and about one of blocks of the open case."""

    def __init__(
        self, kit: Toolkit, channel: Channel, side: Callable[[], Side], *, insecure: bool, timeout_s: float
    ) -> None:
        """Has no buffer yet; `side` gives the producer's side of the open case."""
        self._kit, self._channel, self._side = kit, channel, side
        self._insecure, self._timeout_s = insecure, timeout_s
        self._engine: Any = None
        self._buffer: Any = None
        self._blocks: Any = None
        self._ticket: Any = None
        self._prompts: Prompts | None = None
        self._drawn: list[Any] = []
        self.handlers: dict[str, Callable[[Message], Message]] = {
            "lookup_open": self._open,
            "lookup_insert": self._insert,
            "lookup_close": self._close,
            "blocks_open": self._open_blocks,
            "blocks_insert": self._insert_blocks,
            "blocks_close": self._close_blocks,
        }

    def close(self) -> None:
        """Gives everything back; idempotent."""
        self._close_blocks({})
        buffer, engine = self._buffer, self._engine
        self._buffer = self._engine = self._prompts = None
        self._drawn = []
        if buffer is not None:
            buffer.close()
        if engine is not None:
            engine.close()

    def _open(self, request: Message) -> Message:
        self.close()
        self._prompts = Prompts.from_json(request["prompts"])
        self._drawn = self._prompts.draw()
        self._engine = self._kit.pdkv.Engine(
            "bench-keeper", listen=control.join_address(self._channel.host, 0), insecure=self._insecure
        )
        self._buffer = self._kit.pdkv.LookupBuffer(self._engine, name=NAME, max_bytes=ROOM)
        for number in range(self._prompts.entries):
            self._put(number)
        return {"address": self._engine.address}

    def _insert(self, request: Message) -> Message:
        number = int(str(request["number"]))
        if self._prompts is None or not 0 <= number < self._prompts.entries:
            raise ConfigError(f"there is no prompt `{number}`")
        self._put(number)
        return {}

    def _put(self, number: int) -> None:
        assert self._prompts is not None
        payload = self._prompts.payload(number)
        self._buffer.insert(self._drawn[number], self._prompts.mask(), payload, payload, None)

    def _close(self, _: Message) -> Message:
        self.close()
        return {}

    def _open_blocks(self, _: Message) -> Message:
        self._close_blocks({})
        self._blocks = self._kit.pdkv.LookupBuffer(self._side().engine, name=NAME)
        return {}

    def _insert_blocks(self, _: Message) -> Message:
        if self._blocks is None:
            raise ConfigError("no buffer of blocks is open")
        if self._ticket is not None:
            self._ticket.wait(self._timeout_s)
        side = self._side()
        self._ticket = self._blocks.insert_blocks(tokens_of(side), side.cache, side.ids)
        return {}

    def _close_blocks(self, _: Message) -> Message:
        blocks, self._blocks, self._ticket = self._blocks, None, None
        if blocks is not None:
            blocks.close()
        return {}


def tokens_of(side: Side) -> Any:
    """Gives the tokens whose KV is in a side's table."""
    return np.arange(len(side.ids) * side.case.block_tokens, dtype=np.int64)
