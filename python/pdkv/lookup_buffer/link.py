"""How a consumer and a producer come to have a pipe between them.

The consumer greets the producer's engine on a channel that is named after the buffer, and says where its own engine
listens and what the pipe is called. The producer connects back to that address and goes on only if the engine there is
the very one that greeted. What either says to the other later is not known here.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pdkv.errors import ClosedError, ConfigError, HandshakeError, PdkvError, TransferTimeoutError
from pdkv.pipe import Pipe
from pdkv.pipe.greeting import connect_back, greet, heard

if TYPE_CHECKING:
    from pdkv.engine import Engine, Peer, PipeReceiver

__all__ = ["Door", "check_name", "reach"]

_log = logging.getLogger("pdkv.lookup")

_VERSION = 1
# How often the door looks whether it was closed.
_LOOK_S = 0.25
# A consumer that greets says so at once.
_GREETING_S = 10.0
_MAX_CONSUMERS = 1024
_MAX_NAME = 64


def check_name(name: str) -> None:
    """Checks the name of a buffer or store.

    Raises:
        ConfigError: It can't be one.
    """
    if not 0 < len(name.encode()) <= _MAX_NAME:
        raise ConfigError(f"`name` is `{name}`", operation="lookup", hint=f"give 1 to {_MAX_NAME} bytes")


def reach(engine: Engine, peer: Peer, name: str, *, device: str | None, library: str | None, timeout_s: float) -> Pipe:
    """Makes a pipe to the producer behind `peer`.

    Args:
        engine: The consumer's, which must listen.
        peer: Its connection to the producer's engine.
        name: Of the buffer.
        device: Where received tensors land.
        library: What received tensors are.
        timeout_s: For all of it.

    Raises:
        ConfigError: The engine does not listen.
        HandshakeError: The producer has no such buffer, or can't connect back.
    """
    if engine.address is None:
        raise ConfigError(
            "the consumer's engine does not listen",
            operation="lookup",
            hint='make it with `listen="127.0.0.1:0"`, or with an address that the producer can reach',
        )
    end = time.monotonic() + timeout_s
    token = secrets.token_hex(8)
    pipe = Pipe(engine, peer, channel=_channel(name, token), device=device, library=library, timeout_s=timeout_s)
    try:
        fields = {"version": _VERSION, "token": token}
        sender = greet(engine, peer, _channel(name, "door"), fields, timeout_s)
        sender.close(_left(end))
        pipe.recv_message(_left(end))  # the producer's welcome
    except TransferTimeoutError as error:
        pipe.abort()
        raise HandshakeError(
            f"`{peer.name}` did not answer for the buffer `{name}` within `{timeout_s:g}` s",
            operation="lookup",
            hint="the producer makes its end with the same `name`, and must be able to reach this engine's address",
        ) from error
    except BaseException:
        pipe.abort()
        raise
    return pipe


class Door:
    """Lets consumers in, each into a thread of its own.

    Args:
        engine: The producer's.
        name: Of the buffer.
        serve: Called in the consumer's thread with the pipe and the consumer's name; returns when it has left.
        buffer_bytes: What may wait to be sent to one consumer before whoever sends to it waits.
    """

    def __init__(self, engine: Engine, name: str, serve: Callable[[Pipe, str], None], *, buffer_bytes: int) -> None:
        self._engine, self._name, self._serve, self._buffer_bytes = engine, name, serve, buffer_bytes
        self._closed = threading.Event()
        self._threads = set[threading.Thread]()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="pdkv-lookup-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Lets nobody in any more."""
        self._closed.set()
        self._thread.join()

    def join(self, timeout_s: float) -> bool:
        """Waits until all consumers have left; says whether they have."""
        with self._lock:
            threads = list(self._threads)
        end = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(_left(end))
        return not any(thread.is_alive() for thread in threads)

    def _watch(self) -> None:
        channel = _channel(self._name, "door").encode()
        while not self._closed.is_set():
            try:
                receiver = self._engine.accept_pipe(channel, timeout_s=_LOOK_S)
            except TransferTimeoutError:
                continue
            except ClosedError:
                return  # the engine was closed
            except PdkvError as error:
                _log.warning("a consumer of `%s` was not let in: %s", self._name, error.message)
                self._closed.wait(_LOOK_S)
                continue
            thread = threading.Thread(target=self._let_in, args=(receiver,), name="pdkv-lookup-consumer", daemon=True)
            with self._lock:
                crowded = self._closed.is_set() or len(self._threads) >= _MAX_CONSUMERS
                if not crowded:
                    try:
                        thread.start()
                        self._threads.add(thread)
                    except RuntimeError:  # the system has no more threads
                        crowded = True
            if crowded:
                receiver.close()

    def _let_in(self, receiver: PipeReceiver) -> None:
        try:
            try:
                greeting = heard(receiver, _GREETING_S, "lookup")
                token = _token(greeting)
                peer = connect_back(self._engine, receiver, greeting, _GREETING_S, "lookup")
            finally:
                receiver.close()
            try:
                pipe = self._answer(peer, token)
                self._serve(pipe, receiver.peer)
            finally:
                peer.close()
        except PdkvError as error:
            _log.warning("consumer `%s` was not let in: %s", receiver.peer, error.message)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _answer(self, peer: Peer, token: str) -> Pipe:
        channel = _channel(self._name, token)
        pipe = Pipe(self._engine, peer, channel=channel, buffer_bytes=self._buffer_bytes, library="numpy")
        pipe.send_message(b"welcome")
        return pipe


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())


def _token(greeting: Mapping[str, Any]) -> str:
    token = str(greeting.get("token"))
    if greeting.get("version") != _VERSION or not re.fullmatch("[0-9a-f]{16}", token):
        raise HandshakeError("what came is no greeting of a consumer", operation="lookup")
    return token


def _channel(name: str, which: str) -> str:
    return f"lookup:{name}:{which}"
