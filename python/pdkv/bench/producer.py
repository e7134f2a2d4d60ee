"""The producer process: owns the source pages and does what the consumer's control channel asks.

It serves one consumer at a time. Whatever a request names is checked; a failing request is answered, not fatal.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pdkv.bench import control, host
from pdkv.bench.cases import Case
from pdkv.bench.control import Channel, Message
from pdkv.bench.limits import StreamSource
from pdkv.bench.lookup.ends import Keeper
from pdkv.bench.pipe.ends import Source
from pdkv.bench.side import Side, Toolkit, idle_engines
from pdkv.bench.ucx_loop import LoopEnd
from pdkv.errors import ConfigError, PdkvError


class Producer:
    """Answers the requests of one consumer."""

    def __init__(self, kit: Toolkit, channel: Channel, token: str, *, insecure: bool, timeout_s: float) -> None:
        """Serves over `channel`; the first request must carry `token`."""
        self._kit, self._channel, self._token = kit, channel, token
        self._insecure, self._timeout_s = insecure, timeout_s
        self._side: Side | None = None
        self._streams: StreamSource | None = None
        self._loop: LoopEnd | None = None
        self._idle: list[Any] = []
        self._greeted = False
        self._pipe = Source(kit, channel, insecure=insecure, timeout_s=timeout_s)
        self._keeper = Keeper(kit, channel, lambda: self._open_side, insecure=insecure, timeout_s=timeout_s)
        self._handlers: dict[str, Callable[[Message], Message]] = {
            "hello": self._hello,
            "open": self._open,
            "peer": self._peer,
            "fill": self._fill,
            "publish": self._publish,
            "release": self._release,
            "move": self._move,
            "streams": self._open_streams,
            "send": self._send,
            "loop_open": self._open_loop,
            "loop_connect": self._connect_loop,
            "loop_run": self._run_loop,
            "loop_close": self._close_loop,
            "idle": self._open_idle,
            "close": self._close,
            **self._pipe.handlers,
            **self._keeper.handlers,
        }

    def serve(self) -> None:
        """Answers until the consumer closes the channel."""
        try:
            while (request := self._channel.receive()) is not None:
                self._channel.send(self._reply(request))
        finally:
            self._keeper.close()
            self._close({})
            self._pipe.close()
            self._channel.close()

    def _reply(self, request: Message) -> Message:
        handler = self._handlers.get(str(request.get("do")))
        try:
            if handler is None:
                raise ConfigError(
                    f"the bench request `{request.get('do')}` is unknown", hint="use one pdkv version on both sides"
                )
            if not self._greeted and handler != self._hello:
                raise ConfigError("the first bench request must be `hello`")
            return handler(request)
        except (PdkvError, OSError, ValueError, KeyError, TypeError) as error:
            return control.failure(error)

    def _hello(self, request: Message) -> Message:
        if not secrets.compare_digest(str(request.get("token")), self._token):
            raise ConfigError("the bench token is not the producer's")
        self._greeted = True
        return {"pid": os.getpid(), "host": host.facts(), "versions": host.versions()}

    def _open(self, request: Message) -> Message:
        self._close({})
        case = Case.from_json(request["case"])
        host.require_memory(case.pool_bytes, "the producer's pool")
        listen = control.join_address(self._channel.host, 0)
        self._side = Side(self._kit, case, "producer", listen, insecure=self._insecure, timeout_s=self._timeout_s)
        return {**self._side.describe(), "pid": os.getpid(), "pool": self._side.pages.address}

    def _peer(self, request: Message) -> Message:
        self._open_side.connect(str(request["address"]))
        return {}

    def _fill(self, request: Message) -> Message:
        self._open_side.fill(_number(request, "stamp"))
        return {}

    def _publish(self, request: Message) -> Message:
        consumers = _number(request, "consumers") if "consumers" in request else 1
        return {"references": self._open_side.publish(consumers)}

    def _release(self, _: Message) -> Message:
        self._open_side.release()
        return {}

    def _move(self, request: Message) -> Message:
        wanted = request["wanted"]
        if not isinstance(wanted, list):
            raise ConfigError("`wanted` is not a list")
        return {"timing": self._open_side.move([str(text) for text in wanted]).to_json()}

    def _open_streams(self, request: Message) -> Message:
        side = self._open_side
        self._streams = StreamSource(self._kit.native, side, self._channel.host, _number(request, "count"))
        return {"address": self._streams.address}

    def _send(self, _: Message) -> Message:
        if self._streams is None:
            raise ConfigError("no streams are open")
        return {"seconds": self._streams.send()}

    def _open_loop(self, _: Message) -> Message:
        self._close_loop({})
        self._loop = LoopEnd(self._kit.native, self._open_side)
        return self._loop.describe()

    def _connect_loop(self, request: Message) -> Message:
        self._open_end.connect(request)
        return {}

    def _run_loop(self, request: Message) -> Message:
        return {"seconds": self._open_end.run(one_block=request["one_block"] is True)}

    def _close_loop(self, _: Message) -> Message:
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        return {}

    def _open_idle(self, request: Message) -> Message:
        self._idle = idle_engines(self._kit, _number(request, "count"))
        return {"addresses": [engine.address for engine in self._idle]}

    def _close(self, _: Message) -> Message:
        if self._streams is not None:
            self._streams.close()
            self._streams = None
        self._close_loop({})
        for engine in self._idle:
            engine.close()
        self._idle = []
        if self._side is not None:
            self._side.close()
            self._side = None
        return {}

    @property
    def _open_end(self) -> LoopEnd:
        if self._loop is None:
            raise ConfigError("no loop is open")
        return self._loop

    @property
    def _open_side(self) -> Side:
        if self._side is None:
            raise ConfigError("no case is open")
        return self._side


def _number(request: Message, key: str) -> int:
    value = request[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"`{key}` is `{value!r}`, it must be a whole number")
    return value


def serve(kit: Toolkit, address: str, *, insecure: bool, timeout_s: float) -> None:
    """Serves consumers one after another, for `--role producer`; ends by Ctrl-C.

    Raises:
        ConfigError: The address is not loopback and `insecure` is not set, or it cannot be listened on.
    """
    with control.listen(address) as listener:
        bound = listener.getsockname()
        if not insecure and not (bound[0].startswith("127.") or bound[0] == "::1"):
            raise ConfigError(
                f"`{address}` is not loopback", hint="pass `--insecure` to serve whoever reaches this address"
            )
        print(f"producer, until Ctrl-C, listens on {control.join_address(bound[0], bound[1])}", flush=True)
        while True:
            sock, peer = listener.accept()
            consumer = f"consumer {control.join_address(peer[0], peer[1])}"
            print(f"{consumer} connected", flush=True)
            try:
                Producer(kit, Channel(sock, 3600.0), "", insecure=insecure, timeout_s=timeout_s).serve()
                print(f"{consumer} is done", flush=True)
            except PdkvError as error:
                print(f"{consumer} lost: {error}", file=sys.stderr, flush=True)


def serve_spawned(kit: Toolkit, *, insecure: bool, timeout_s: float) -> None:
    """Serves the one consumer that started this process."""
    token, channel = control.greet()
    Producer(kit, channel, token, insecure=insecure, timeout_s=timeout_s).serve()


@contextmanager
def spawned(timeout_s: float) -> Iterator[Channel]:
    """Starts a producer process and connects to it; it ends with the context.

    Raises:
        PeerLostError: It did not start.
    """
    arguments = ["-m", "pdkv.bench", "--role", "producer", "--spawned", "--timeout", str(timeout_s)]
    with control.spawned(arguments, timeout_s, "the producer process") as channel:
        yield channel


@contextmanager
def threaded(kit: Toolkit, timeout_s: float) -> Iterator[Channel]:
    """Runs the producer in a thread of this process, for the `inproc` transport and for tests."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = control.connect(control.join_address(*listener.getsockname()[:2]), timeout_s)
        sock, _ = listener.accept()
    server = Producer(kit, Channel(sock, 3600.0), "", insecure=False, timeout_s=timeout_s)
    thread = threading.Thread(target=server.serve, name="bench-producer", daemon=True)
    thread.start()
    try:
        channel.ask("hello", token="")
        yield channel
    finally:
        channel.close()
        thread.join(timeout=30)
