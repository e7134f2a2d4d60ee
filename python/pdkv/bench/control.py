"""The bench's own channel between its two processes: one JSON object a line over TCP. No payload, no pickle.

The consumer asks, the producer answers; a failure travels as its class name and text.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pdkv import errors
from pdkv.errors import ConfigError, PdkvError, PeerLostError, PeerUnreachableError

_MAX_LINE = 4 << 20
_FIRST_CONTACT_S = 60.0
_QUIET_S = 3600.0
_LEAVES_S = 30.0

Message = dict[str, object]


class Channel:
    """One connected socket that carries messages."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """Takes the socket over; every wait is at most `timeout_s`."""
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._file = sock.makefile("rb")

    @property
    def host(self) -> str:
        """This machine's address as the other side reaches it."""
        return str(self._sock.getsockname()[0])

    def send(self, message: Message) -> None:
        """Sends one message.

        Raises:
            PeerLostError: The other process is gone.
        """
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            self._sock.sendall(line)
        except OSError as error:
            raise PeerLostError(f"the other bench process is gone: {error}") from error

    def receive(self) -> Message | None:
        """Waits for one message; `None` means the other side has closed.

        Raises:
            PeerLostError: It fell silent or sent something else than a message.
        """
        try:
            line = self._file.readline(_MAX_LINE + 1)
        except OSError as error:
            raise PeerLostError(f"the other bench process fell silent: {error}") from error
        if not line:
            return None
        if len(line) > _MAX_LINE or not line.endswith(b"\n"):
            raise PeerLostError(f"a message of the other bench process is cut or larger than `{_MAX_LINE}` bytes")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise PeerLostError("the other bench process sent something that is not JSON") from error
        if not isinstance(message, dict):
            raise PeerLostError("the other bench process sent something that is not an object")
        return message

    def ask(self, do: str, **arguments: object) -> Message:
        """Sends a request and waits for its answer.

        Raises:
            PdkvError: What the other side met, under its own class.
        """
        self.send({"do": do, **arguments})
        return self.answer()

    def answer(self) -> Message:
        """Waits for the answer to a request sent before.

        Raises:
            PdkvError: What the other side met, under its own class.
        """
        reply = self.receive()
        if reply is None:
            raise PeerLostError("the other bench process ended", hint="its own output says why")
        if "error" in reply:
            raise _error(reply)
        return reply

    def close(self) -> None:
        """Closes the socket; idempotent."""
        self._file.close()
        self._sock.close()


def failure(error: Exception) -> Message:
    """Writes an exception as an answer."""
    hint = error.hint if isinstance(error, PdkvError) else None
    message = error.message if isinstance(error, PdkvError) else str(error)
    return {"error": message, "class": type(error).__name__, "hint": hint}


def _error(reply: Message) -> PdkvError:
    found = getattr(errors, str(reply.get("class")), None)
    kind = found if isinstance(found, type) and issubclass(found, PdkvError) else PdkvError
    hint = reply.get("hint")
    return kind(str(reply["error"]), operation="producer", hint=hint if isinstance(hint, str) else None)


def split_address(address: str) -> tuple[str, int]:
    """Reads `host:port`, the host in brackets if it is IPv6.

    Raises:
        ConfigError: It is not an address.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"`{address}` is not an address", hint="write `host:port`, for example `127.0.0.1:7000`")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Writes `host:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str) -> socket.socket:
    """Opens a listening socket.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    host, port = split_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on `{address}`: {error}") from error


def connect(address: str, timeout_s: float) -> Channel:
    """Connects to a producer.

    Raises:
        PeerUnreachableError: Nobody answers there.
    """
    try:
        sock = socket.create_connection(split_address(address), timeout=timeout_s)
    except OSError as error:
        raise PeerUnreachableError(f"no bench producer answers at `{address}`: {error}") from error
    return Channel(sock, timeout_s)


@contextmanager
def spawned(
    arguments: Sequence[str], timeout_s: float, what: str, environment: Mapping[str, str] | None = None
) -> Iterator[Channel]:
    """Starts a Python process that calls `greet`, and connects to it; it ends with the context.

    Args:
        arguments: Of the interpreter.
        timeout_s: How long a request may take.
        what: The process, for messages.
        environment: Its environment, if that is not ours.

    Raises:
        PeerLostError: It did not start, or did not end well.
    """
    token = secrets.token_hex(16)
    command = [sys.executable, *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(token + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            raise PeerLostError(f"{what} ended at once", hint="its own output says why")
        channel = connect(str(json.loads(line)["address"]), timeout_s)
        try:
            channel.ask("hello", token=token)
            yield channel
        finally:
            channel.close()
        try:
            code = child.wait(timeout=_LEAVES_S)
        except subprocess.TimeoutExpired as error:
            raise PeerLostError(f"{what} did not end within `{_LEAVES_S:g}` s and was killed") from error
        if code != 0:
            raise PeerLostError(f"{what} ended with code `{code}`")
    finally:
        child.stdin.close()
        child.stdout.close()
        if child.poll() is None:
            child.kill()
            child.wait()


def greet() -> tuple[str, Channel]:
    """Meets the process that started this one by `spawned`: token on stdin, address on stdout, both one line."""
    token = sys.stdin.readline().strip()
    with listen("127.0.0.1:0") as listener:
        listener.settimeout(_FIRST_CONTACT_S)
        print(json.dumps({"address": join_address(*listener.getsockname()[:2])}), flush=True)
        sock, _ = listener.accept()
    return token, Channel(sock, _QUIET_S)


def serve(channel: Channel, token: str, handlers: Mapping[str, Callable[[Message], Message]]) -> None:
    """Answers the process that started this one until it closes the channel; its first request must carry `token`.

    Whatever a handler raises is an answer: other programs have errors of many kinds, and the row says which it was.
    """
    greeted = False
    while (request := channel.receive()) is not None:
        do = str(request.get("do"))
        try:
            if not greeted:
                greeted = do == "hello" and secrets.compare_digest(str(request.get("token")), token)
                if not greeted:
                    raise ConfigError("the bench token is not this process's")
                channel.send({})
            else:
                channel.send(handlers[do](request))
        except PdkvError as error:
            channel.send(failure(error))
        except Exception as error:  # noqa: BLE001 - said above
            channel.send({"error": f"{type(error).__name__}: {error}", "class": "PdkvError", "hint": None})
    channel.close()
