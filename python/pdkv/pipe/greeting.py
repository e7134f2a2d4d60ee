"""How an engine makes itself known to one that it has connected to: where it listens, and what for.

The other engine connects back to that address, and goes on only if the engine there is the very one that named it. A
greeting is JSON in the tag of the one item of a pipe; every field of it is the peer's word and is checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pdkv.errors import HandshakeError, PdkvError

if TYPE_CHECKING:
    from pdkv.engine import Engine, Peer, PipeReceiver, PipeSender

__all__ = ["connect_back", "greet", "heard"]

_MARK = b"g"
_MAX_ADDRESS = 256


def greet(engine: Engine, peer: Peer, channel: str, fields: Mapping[str, Any], timeout_s: float) -> PipeSender:
    """Greets a peer.

    Args:
        engine: This end's, whose address is said.
        peer: Who is greeted.
        channel: Where the peer listens for greetings.
        fields: What else is said.
        timeout_s: For getting it on its way.

    Returns:
        What must be kept until the peer has heard it; `close` waits for that, dropping it takes the greeting back.

    Raises:
        PdkvError: The peer is gone, or its release has no pipes.
    """
    sender = peer.open_pipe(channel.encode())
    words = json.dumps({**fields, "address": engine.address}).encode()
    sender.send(_MARK + words, None, (), (), 0, 0, None, timeout_s)
    return sender


def heard(receiver: PipeReceiver, timeout_s: float, operation: str) -> dict[str, Any]:
    """The greeting that came; its `address` looks like one, everything else in it is yet to be checked.

    Raises:
        HandshakeError: What came is none, or nothing came in time.
    """
    try:
        tag = receiver.recv(timeout_s)[0]
        greeting = json.loads(tag[1:]) if tag[:1] == _MARK else None
    except (PdkvError, ValueError, RecursionError) as error:
        raise _no_greeting(receiver, operation) from error
    if not isinstance(greeting, dict) or not _is_address(greeting.get("address")):
        raise _no_greeting(receiver, operation)
    return greeting


def _is_address(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isprintable() and len(value) <= _MAX_ADDRESS


def connect_back(
    engine: Engine, receiver: PipeReceiver, greeting: Mapping[str, Any], timeout_s: float, operation: str
) -> Peer:
    """Connects to the engine that greeted.

    Raises:
        HandshakeError: Somebody else is at the address that it named.
        PeerUnreachableError: Nobody is.
    """
    peer = engine.connect(greeting["address"], timeout_s=timeout_s)
    if peer.incarnation == receiver.incarnation:
        return peer
    peer.close()
    text = f"`{peer.address}` is engine `{peer.name}`, and not `{receiver.peer}`, which named it"
    raise HandshakeError(text, operation=operation)


def _no_greeting(receiver: PipeReceiver, operation: str) -> HandshakeError:
    return HandshakeError(f"what `{receiver.peer}` said is no greeting", operation=operation)
