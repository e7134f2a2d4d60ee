"""The directory of a producer: tells whoever asks which ranks there are, where, and what their caches mean.

Served beside the scheduler by one thread that waits for everybody at once, so nobody slow holds up another, and the LLM
engine's loop not at all. Holds no secret: what it tells lets nobody have a block. Knows no transfers.

One question and one answer a connection, each a JSON text behind its length (4 bytes, big endian).
"""

from __future__ import annotations

import json
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

from pdkv.connectors.core.work import RankInfo
from pdkv.errors import ConfigError

__all__ = ["ANSWER_BYTES", "LENGTH", "MAX_CACHES", "QUESTION_BYTES", "VERSION", "Directory"]

_log = logging.getLogger("pdkv.connectors")

_OPERATION = "directory"
VERSION = 1
LENGTH = struct.Struct(">I")
# The longest question and answer.
QUESTION_BYTES = 4 << 10
ANSWER_BYTES = 1 << 20
# The most caches that a rank may tell of.
MAX_CACHES = 256
# How long a connection may take from its first byte to its last.
_MANNERS_S = 5.0
# Connections at once. Who comes after takes the place of the oldest: an honest question takes milliseconds.
_MAX_CONNECTIONS = 64
# How long to leave new connections alone when this process has no descriptor left for one.
_PAUSE_S = 0.2


class Directory:
    """Serves the ranks of one LLM engine.

    Args:
        engine_id: The LLM engine.
        ranks: Its ranks, by rank; of each everything but the secrets is told.
        host: Where to listen.
        port: Where to listen; 0 for any.
        insecure: Listen beyond loopback although anybody there may ask.

    Raises:
        ConfigError: It can't listen there, or may not.
    """

    def __init__(
        self,
        engine_id: str,
        ranks: Sequence[RankInfo],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        insecure: bool = False,
    ) -> None:
        self._answer = _framed(
            {"version": VERSION, "engine_id": engine_id, "ranks": [_told(rank) for rank in ranks]},
        )
        if len(self._answer) > ANSWER_BYTES or any(len(rank.groups) > MAX_CACHES for rank in ranks):
            caches = sum(len(rank.groups) for rank in ranks)
            text = f"`{len(ranks)}` ranks with `{caches}` caches are too many for a directory"
            raise ConfigError(text, operation=_OPERATION)
        self._socket = _listen(host, port, insecure=insecure)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        pair: tuple[socket.socket, ...] = ()
        try:
            self._wake, self._woken = pair = socket.socketpair()
            self._selector = selectors.DefaultSelector()
        except OSError as error:
            for each in (self._socket, *pair):
                each.close()
            raise ConfigError(f"the directory can't be served: {error}", operation=_OPERATION) from error
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="pdkv-directory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and drops who is connected. Closing twice is fine."""
        with suppress(OSError):  # closed before
            self._wake.send(b"x")
        self._thread.join(5.0)
        self._wake.close()

    def _serve(self) -> None:
        guests = dict[socket.socket, _Guest]()  # oldest first
        with self._selector as selector, self._socket, self._woken:
            self._paused_until: float | None = None
            try:
                while self._round(guests, selector):
                    pass
            finally:
                for guest in list(guests.values()):
                    _drop(guests, guest, selector)

    def _round(self, guests: dict[socket.socket, _Guest], selector: selectors.BaseSelector) -> bool:
        """Waits for something to do and does it; gives whether to go on."""
        try:
            for key, _ in selector.select(_patience(guests, self._paused_until)):
                if key.fileobj is self._woken:
                    return False
                if key.fileobj is self._socket:
                    if not self._admit(guests, selector):
                        selector.unregister(self._socket)
                        self._paused_until = time.monotonic() + _PAUSE_S
                elif (guest := guests.get(key.data)) is not None and not guest.go_on(self._answer, selector):
                    _drop(guests, guest, selector)
            now = time.monotonic()
            while guests and (oldest := next(iter(guests.values()))).end <= now:
                _drop(guests, oldest, selector)
            if self._paused_until is not None and self._paused_until <= now:
                selector.register(self._socket, selectors.EVENT_READ)
                self._paused_until = None
        except Exception:  # noqa: BLE001 - a bug of ours with one guest must not keep the others out
            time.sleep(_PAUSE_S)
            _log.exception("the directory met a bug, and begins anew")
            for guest in list(guests.values()):
                with suppress(Exception):
                    _drop(guests, guest, selector)
        return True

    def _admit(self, guests: dict[socket.socket, _Guest], selector: selectors.BaseSelector) -> bool:
        """Accepts one connection; gives whether the next one may be accepted at once."""
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return True  # it left again
        except OSError as error:
            _log.warning("the directory can't accept a connection: %s", error)
            return False
        if len(guests) >= _MAX_CONNECTIONS:
            _drop(guests, next(iter(guests.values())), selector)
        accepted.setblocking(False)
        guests[accepted] = _Guest(accepted)
        selector.register(accepted, selectors.EVENT_READ, accepted)
        return True


class _Guest:
    """One connection: first its question comes, then its answer goes."""

    __slots__ = ("end", "question", "rest", "socket")

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.end = time.monotonic() + _MANNERS_S
        self.question = bytearray()
        self.rest: memoryview | None = None

    def go_on(self, answer: bytes, selector: selectors.BaseSelector) -> bool:
        """Does what can be done without waiting; gives whether there is more to do."""
        try:
            if self.rest is None and not self._hear(answer):
                return False
            if self.rest is None:
                return True
            self.rest = self.rest[self.socket.send(self.rest) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return False
        if not self.rest:
            return False
        selector.modify(self.socket, selectors.EVENT_WRITE, self.socket)
        return True

    def _hear(self, answer: bytes) -> bool:
        part = self.socket.recv(QUESTION_BYTES + LENGTH.size)
        self.question += part
        if not part:
            return False
        if len(self.question) < LENGTH.size:
            return True
        (length,) = LENGTH.unpack_from(self.question)
        if length > QUESTION_BYTES or len(self.question) > LENGTH.size + length:
            return False
        if len(self.question) == LENGTH.size + length:
            text = _answer_to(bytes(self.question[LENGTH.size :]), answer)
            if text is None:
                return False
            self.rest = memoryview(text)
        return True


def _answer_to(question: bytes, answer: bytes) -> bytes | None:
    """The answer to a question, or `None` to what is no question."""
    try:
        asked = json.loads(question)
        version, ask = asked["version"], asked["ask"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if type(version) is int and version == VERSION and ask == "ranks":
        return answer
    # Whoever it is speaks a later version, and can tell what this one knows.
    return _framed({"version": VERSION, "error": "this version answers `ranks` only"})


def _told(rank: RankInfo) -> dict[str, object]:
    # By name, so that what is added to a rank's information later isn't told by accident.
    return {
        "tp_rank": rank.tp_rank,
        "pp_rank": rank.pp_rank,
        "address": rank.address,
        "incarnation": rank.incarnation,
        "groups": [dict(group) for group in rank.groups],
    }


def _framed(message: object) -> bytes:
    text = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(text)) + text


def _patience(guests: dict[socket.socket, _Guest], paused_until: float | None) -> float | None:
    """Seconds until something is due."""
    ends = [guest.end for guest in guests.values()][:1] + ([] if paused_until is None else [paused_until])
    return max(0.0, min(ends) - time.monotonic()) if ends else None


def _drop(guests: dict[socket.socket, _Guest], guest: _Guest, selector: selectors.BaseSelector) -> None:
    del guests[guest.socket]
    selector.unregister(guest.socket)
    guest.socket.close()


def _listen(host: str, port: int, *, insecure: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"there is no host `{host}` to listen at: {error}", operation=_OPERATION) from error
    if not ip_address(str(address[0]).partition("%")[0]).is_loopback and not insecure:
        raise ConfigError(
            f"`{host}` is reachable from other hosts, and a directory tells whoever asks",
            operation=_OPERATION,
            hint="listen at 127.0.0.1, or set `insecure` on a network you trust",
        )
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_MAX_CONNECTIONS)
        listening.setblocking(False)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(f"the directory can't listen at `{host}:{port}`: {error}", operation=_OPERATION) from error
    return listening
