"""pdkv's pipe between the two processes of a run: the producer's end, which sends, and the consumer's, which measures.

Each end has an engine of its own with one transport alone, and uses the public API as any user would.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pdkv.bench import control
from pdkv.bench.control import Channel, Message
from pdkv.bench.mover import Mover
from pdkv.bench.pipe import tensors
from pdkv.bench.pipe.exchange import Exchange, Way
from pdkv.bench.pipe.tensors import Tensors
from pdkv.bench.side import Toolkit
from pdkv.errors import ConfigError, PdkvError

CHANNEL = "bench"
STREAM = "stream"  # the way of tensors that are too small for a transport


def make_engine(kit: Toolkit, role: str, host: str, way: Way, *, insecure: bool) -> Any:
    """Makes an engine that has one transport alone."""
    options: dict[str, Any] = {"transports": [way.transport]}
    if way.transport == "ucx":
        options = way.ucx.engine_options(kit.pdkv)
    return kit.pdkv.Engine(
        f"bench-{role}",
        listen=control.join_address(host, 0),
        threads=way.threads,
        tcp_streams=way.streams,
        insecure=insecure,
        **options,
    )


class Source:
    """The producer's end; its methods answer requests of the consumer."""

    def __init__(self, kit: Toolkit, channel: Channel, *, insecure: bool, timeout_s: float) -> None:
        """Has no pipe yet."""
        self._kit, self._channel = kit, channel
        self._insecure, self._timeout_s = insecure, timeout_s
        self._engine: Any = None
        self._pipe: Any = None
        self._tensors: Tensors | None = None
        self.handlers: dict[str, Callable[[Message], Message]] = {
            "pipe_open": self._open,
            "pipe_load": self._load,
            "pipe_fill": self._fill,
            "pipe_send": self._send,
            "pipe_close": self._close,
        }

    def close(self) -> None:
        """Gives everything back; idempotent."""
        pipe, engine = self._pipe, self._engine
        self._pipe = self._engine = self._tensors = None
        if pipe is not None:
            pipe.abort()
        if engine is not None:
            engine.close()

    def _open(self, request: Message) -> Message:
        self.close()
        way = Way.from_json(request["way"])
        self._engine = make_engine(self._kit, "sender", self._channel.host, way, insecure=self._insecure)
        peer = self._engine.connect(str(request["address"]), timeout_s=self._timeout_s)
        self._pipe = self._kit.pdkv.Pipe(self._engine, peer, channel=CHANNEL)
        return {"address": self._engine.address}

    def _load(self, request: Message) -> Message:
        self._tensors = None
        self._tensors = Tensors(Exchange.from_json(request["exchange"]), self._kit.native)
        return {}

    def _fill(self, request: Message) -> Message:
        self._loaded.fill(int(str(request["stamp"])))
        return {}

    def _send(self, _: Message) -> Message:
        if self._pipe is None:
            raise ConfigError("no pipe is open")
        pipe, sent = self._pipe, self._loaded.all
        send, before, timeout_s = pipe.send_tensor, pipe.stats, self._timeout_s
        for tensor in sent:
            send(tensor, timeout_s)
        pipe.flush(timeout_s)
        grown = {name: count - before[name] for name, count in pipe.stats.items()}
        answer: Message = {"staged": grown["staged_bytes"], "path": STREAM, "detail": ""}
        if grown["bytes"] > grown["inline_bytes"]:
            answer |= {"path": str(pipe.path), "detail": str(pipe.path.detail)}
        return answer

    def _close(self, _: Message) -> Message:
        self.close()
        return {}

    @property
    def _loaded(self) -> Tensors:
        if self._tensors is None:
            raise ConfigError("no tensors are loaded")
        return self._tensors


class PipeMover(Mover):
    """The consumer's end, and through the control channel the producer's.

    Attributes:
        path: The transport that the last exchange went by, or `STREAM`; `note` says what that rides on.
        staged_bytes: Of the last exchange.
    """

    kind = "pdkv"
    name = "pipe"

    def __init__(
        self, kit: Toolkit, producer: Channel, way: Way, library: str, *, insecure: bool, timeout_s: float
    ) -> None:
        """Makes both engines, connects each to the other, and opens the pipe.

        Raises:
            PdkvError: An end could not be made.
        """
        self._kit, self._producer, self._way, self._timeout_s = kit, producer, way, timeout_s
        self._exchange: Exchange | None = None
        self._received: list[Any] = []
        self.path, self.staged_bytes = STREAM, 0
        self._engine = make_engine(kit, "receiver", producer.host, way, insecure=insecure)
        try:
            opened = producer.ask("pipe_open", way=way.to_json(), address=self._engine.address)
            peer = self._engine.connect(str(opened["address"]), timeout_s=timeout_s)
            self._pipe = kit.pdkv.Pipe(self._engine, peer, channel=CHANNEL, library=library)
        except BaseException:
            self._engine.close()
            raise

    def load(self, exchange: Exchange) -> None:
        """Lets the producer make the tensors of an exchange."""
        self._received.clear()
        self._producer.ask("pipe_load", exchange=exchange.to_json())
        self._exchange = exchange

    def fill(self, stamp: int) -> None:
        """Lets the producer fill its tensors, and lets go of those that came before."""
        self._received.clear()
        self._producer.ask("pipe_fill", stamp=stamp)

    def run(self) -> float:
        """Receives every tensor; the clock starts with the request and stops with the last of them.

        Raises:
            PdkvError: It failed, or went another way than the one that was asked for.
        """
        receive, count, timeout_s = self._pipe.recv_tensor, self._loaded.count, self._timeout_s
        started = time.perf_counter()
        self._producer.send({"do": "pipe_send"})
        try:
            self._received = [receive(timeout_s) for _ in range(count)]
        except PdkvError:
            self._producer.answer()  # what the producer met, if anything, says more
            raise
        seconds = time.perf_counter() - started
        answer = self._producer.answer()
        self.staged_bytes, self.path, self.note = int(str(answer["staged"])), str(answer["path"]), str(answer["detail"])
        if self.path not in (STREAM, self._way.transport):
            raise PdkvError(f"`{self._way.transport}` was required, the path was `{self.path}`")
        return seconds

    def count_wrong(self, stamp: int) -> int:
        """Checks what was received."""
        return tensors.count_wrong(self._received, self._loaded, stamp, self._kit.native, f"pipe stamp {stamp}")

    def close(self) -> None:
        """Ends both ends of the pipe, and the engines."""
        self._received.clear()
        try:
            self._producer.ask("pipe_close")
        finally:
            self._pipe.abort()
            self._engine.close()

    @property
    def _loaded(self) -> Exchange:
        if self._exchange is None:
            raise ConfigError("no tensors are loaded")
        return self._exchange
