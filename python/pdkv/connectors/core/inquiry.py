"""Asks a producer's directory for its ranks, and believes nothing it says: what comes is typed, small and on time.

Blocks for as long as it was given; runs in the threads of `dial`. Knows no transfers.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from typing import Any

from pdkv.connectors.core.directory import ANSWER_BYTES, LENGTH, MAX_CACHES, VERSION
from pdkv.connectors.core.shown import shown
from pdkv.errors import HandshakeError, PeerUnreachableError

__all__ = ["Ranks", "ToldRank", "fetch"]

_OPERATION = "ask the directory"
# Names that are looked up at once.
_resolvers = threading.BoundedSemaphore(16)
_MAX_RANKS = 4096
_MAX_FIELDS = 64
_MAX_TEXT = 1024


@dataclass(frozen=True, slots=True)
class ToldRank:
    """A rank as a directory tells it.

    Attributes:
        tp_rank: Position among the ranks that share the heads.
        pp_rank: Position among the ranks that share the layers.
        address: `host:port` of its engine, as told.
        incarnation: Life of its engine.
        groups: What each of its caches means: text and integers by name.
    """

    tp_rank: int
    pp_rank: int
    address: str
    incarnation: str
    groups: tuple[dict[str, object], ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """What a directory answered.

    Attributes:
        engine_id: The LLM engine that it speaks for.
        ranks: Its ranks, in the order told.
        host: The address at which the directory was reached.
    """

    engine_id: str
    ranks: tuple[ToldRank, ...]
    host: str


def fetch(host: str, port: int, timeout_s: float) -> Ranks:
    """Asks a directory; blocks for `timeout_s` at most.

    Raises:
        PeerUnreachableError: Nobody answers in time.
        HandshakeError: Who answers is no directory, or speaks another version.
    """
    end = time.monotonic() + timeout_s
    where = f"`{shown(host)}:{port}`"
    try:
        with _connect(host, port, end) as connection:
            question = json.dumps({"version": VERSION, "ask": "ranks"}).encode()
            connection.settimeout(_left(end))
            connection.sendall(LENGTH.pack(len(question)) + question)
            (length,) = LENGTH.unpack(_receive(connection, LENGTH.size, end))
            answer = _receive(connection, length, end) if length <= ANSWER_BYTES else None
            reached = str(connection.getpeername()[0])
    except (OSError, UnicodeError, OverflowError, EOFError) as error:
        raise PeerUnreachableError(
            f"no directory answers at {where}: {str(error) or 'it hung up'}",
            operation=_OPERATION,
            hint="is the producer running, and can `remote_host` and `remote_port` be reached from here?",
        ) from error
    if answer is None:
        raise _no_directory(where, f"an answer of `{length}` bytes, at most `{ANSWER_BYTES}` are read")
    return _read(answer, where, reached)


def _connect(host: str, port: int, end: float) -> socket.socket:
    failure: OSError | None = None
    for family, kind, protocol, _, address in _look_up(host, port, end):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_left(end))
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = failure or error
        else:
            return connection
    raise failure or OSError("the name has no address")


def _look_up(host: str, port: int, end: float) -> list[Any]:
    """Looks a name up, in a thread of its own: a resolver that is stuck can't be told to stop."""
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        pass
    else:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    resolvers = _resolvers
    if not resolvers.acquire(timeout=_left(end)):
        raise TimeoutError("too many names are being looked up")
    found = SimpleQueue[list[Any] | Exception]()

    def look_up() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:  # noqa: BLE001 - it is raised below
            found.put(error)
        finally:
            resolvers.release()

    try:
        threading.Thread(target=look_up, name="pdkv-resolve", daemon=True).start()
    except RuntimeError as error:
        resolvers.release()
        raise OSError(str(error)) from error
    try:
        answer = found.get(timeout=_left(end))
    except Empty:
        raise TimeoutError("the name was not looked up in time") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _receive(connection: socket.socket, nbytes: int, end: float) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        connection.settimeout(_left(end))
        part = connection.recv(min(nbytes - len(received), 1 << 16))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _read(answer: bytes, where: str, reached: str) -> Ranks:
    try:
        told = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise _no_directory(where, "what is no JSON") from error
    if not isinstance(told, dict):
        raise _no_directory(where, "what is no object")
    if told.get("version") != VERSION or "error" in told:
        raise HandshakeError(
            f"the directory at {where} speaks version `{shown(told.get('version'))}`, this end `{VERSION}`",
            operation=_OPERATION,
            context={"version": f"{VERSION} here, {shown(told.get('version'))} there"},
            hint="both ends must run releases of pdkv that understand each other",
        )
    try:
        ranks = _list(told["ranks"], _MAX_RANKS)
        return Ranks(_text(told["engine_id"]), tuple(_rank(rank) for rank in ranks), reached)
    except (KeyError, TypeError, ValueError) as error:
        raise _no_directory(where, f"ranks that can't be read: {shown(str(error))}") from error


def _rank(told: Any) -> ToldRank:
    groups = tuple(_group(group) for group in _list(told["groups"], MAX_CACHES))
    return ToldRank(
        _number(told["tp_rank"]), _number(told["pp_rank"]), _text(told["address"]), _text(told["incarnation"]), groups
    )


def _group(told: Any) -> dict[str, object]:
    if not isinstance(told, Mapping) or len(told) > _MAX_FIELDS:
        raise TypeError("a group")
    return {_text(name): _text(value) if isinstance(value, str) else _number(value) for name, value in told.items()}


def _list(value: Any, longest: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > longest:
        raise TypeError("a list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise TypeError("a text")
    return value


def _number(value: Any) -> int:
    # True is an int, and an integer of a thousand digits is too.
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError("a number")
    return value


def _no_directory(where: str, what: str) -> HandshakeError:
    return HandshakeError(
        f"what listens at {where} is no directory: it sent {what}",
        operation=_OPERATION,
        hint="is another program at `remote_host` and `remote_port`?",
    )
