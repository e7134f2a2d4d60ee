"""How the two ends of a `PdkvPipe` meet: rank 0 listens at the agreed place, rank 1 comes, rank 0 connects back.

The listener is rank 0's engine itself, so nothing else listens and no store is needed. Whoever comes and is not rank 1
costs rank 0 a few seconds and is forgotten.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from pdkv.engine import Engine
from pdkv.errors import ConfigError, PdkvError, PeerLostError, PeerUnreachableError, TransferTimeoutError
from pdkv.pipe.config import PipeConfig
from pdkv.pipe.greeting import connect_back, greet, heard

if TYPE_CHECKING:
    from pdkv.engine import Peer, PipeReceiver

__all__ = ["Met", "meet"]

_log = logging.getLogger("pdkv.pipe")

_OPERATION = "pipe"
_VERSION = 1
# Between two tries to reach a rank 0 that does not listen yet.
_RETRY_S = 0.05
# How often rank 1 looks whether rank 0 still lives.
_LOOK_S = 0.25
# How long whoever comes may take for each step, before the next one is heard.
_MANNERS_S = 10.0


class Met(NamedTuple):
    """The two engines of one end, connected.

    Attributes:
        engine: This end's, made for the pipe and closed with it.
        peer: The connection to the other end's.
    """

    engine: Engine
    peer: Peer


def meet(config: PipeConfig, port: int) -> Met:
    """Makes this end's engine and connects it with the other's; blocks until the peer is up.

    Raises:
        ConfigError: The ends disagree, or the settings can't be; names what differs.
        PeerUnreachableError: The other end did not come within `store_timeout`.
        HandshakeError: Somebody came who is not the other end.
    """
    if config.kv_parallel_size != 2 or config.kv_rank not in (0, 1):
        raise ConfigError(
            f"`kv_rank` is `{config.kv_rank}` of `kv_parallel_size` `{config.kv_parallel_size}`",
            operation=_OPERATION,
            hint='a pipe has two ends: `"kv_parallel_size": 2`, `"kv_rank"` 0 at one and 1 at the other',
        )
    if port > 65535:
        raise ConfigError(f"`kv_port` + `port_offset` is `{port}`, the last port is `65535`", operation=_OPERATION)
    end = time.monotonic() + config.store_timeout_s
    own = f"{_host(config.kv_ip)}:{port}" if config.kv_rank == 0 else f"{_route_to(config.kv_ip, port)}:0"
    extra = config.kv_connector_extra_config
    options = {name: extra[name] for name in ("transports", "threads", "insecure") if name in extra}
    engine = Engine(f"pipe-{port}-rank-{config.kv_rank}", listen=own, **options)
    try:
        peer = (
            _wait_for_rank_1(engine, config, port, end)
            if config.kv_rank == 0
            else _go_to_rank_0(engine, config, port, end)
        )
    except BaseException:
        engine.close()
        raise
    return Met(engine, peer)


def _wait_for_rank_1(engine: Engine, config: PipeConfig, port: int, end: float) -> Peer:
    other: PdkvError | None = None
    while True:
        try:
            receiver = engine.accept_pipe(_channel(port).encode(), timeout_s=_left(end))
        except TransferTimeoutError as error:
            raise _nobody(config, port, "rank 1 did not come") from (other or error)
        try:
            return _answer(engine, receiver, config, port)
        except PdkvError as error:
            # Whoever that was does not keep the right one out.
            _log.warning("`%s` is not the other end of the pipe: %s", receiver.peer, error.message)
            other = error
        finally:
            receiver.close()


def _answer(engine: Engine, receiver: PipeReceiver, config: PipeConfig, port: int) -> Peer:
    greeting = heard(receiver, _MANNERS_S, _OPERATION)
    peer = connect_back(engine, receiver, greeting, _MANNERS_S, _OPERATION)
    try:
        # It is told first, so that it knows too what they disagree about.
        greet(engine, peer, _channel(port), _facts(config), _MANNERS_S).close(_MANNERS_S)
        _compare(greeting, config)
    except BaseException:
        peer.close()
        raise
    return peer


def _go_to_rank_0(engine: Engine, config: PipeConfig, port: int, end: float) -> Peer:
    while True:
        try:
            return _come(engine, config, port, end)
        except (PeerUnreachableError, PeerLostError) as error:
            # It does not listen yet, or it was just going.
            if _left(end) <= _RETRY_S:
                raise _nobody(config, port, "rank 0 does not listen") from error
            time.sleep(_RETRY_S)


def _come(engine: Engine, config: PipeConfig, port: int, end: float) -> Peer:
    peer = engine.connect(f"{_host(config.kv_ip)}:{port}", timeout_s=max(0.1, min(5.0, _left(end))))
    try:
        sender = greet(engine, peer, _channel(port), _facts(config), _MANNERS_S)
        while True:
            try:
                receiver = engine.accept_pipe(
                    _channel(port).encode(), incarnation=peer.incarnation, timeout_s=min(_LOOK_S, _left(end))
                )
                break
            except TransferTimeoutError as error:
                if not peer.alive:
                    raise PeerLostError("rank 0 ended before it answered", operation=_OPERATION) from error
                if not _left(end):
                    text = "rank 0 did not answer; perhaps it has met another rank 1"
                    raise _nobody(config, port, text) from error
        try:
            _compare(heard(receiver, _left(end), _OPERATION), config)
            sender.close(_MANNERS_S)
        finally:
            receiver.close()
    except BaseException:
        peer.close()
        raise
    return peer


def _facts(config: PipeConfig) -> dict[str, Any]:
    return {"version": _VERSION, "rank": config.kv_rank, "kv_parallel_size": config.kv_parallel_size}


def _compare(greeting: dict[str, Any], config: PipeConfig) -> None:
    expected = {**_facts(config), "rank": 1 - (config.kv_rank or 0)}
    different = [name for name, value in expected.items() if greeting.get(name) != value]
    if different:
        facts = ", ".join(
            f"`{name}` is `{greeting.get(name)}` there, `{expected[name]}` was expected" for name in different
        )
        raise ConfigError(f"the ends of the pipe disagree: {facts}", operation=_OPERATION)


def _channel(port: int) -> str:
    return f"meet:{port}"


def _host(name: str) -> str:
    """A host as it stands in front of a port."""
    return f"[{name}]" if ":" in name else name


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())


def _nobody(config: PipeConfig, port: int, what: str) -> PeerUnreachableError:
    return PeerUnreachableError(
        f"{what} within `{config.store_timeout_s:g}` s at `{config.kv_ip}:{port}`",
        operation=_OPERATION,
        hint="start both ends with the same `kv_ip`, `kv_port` and `port_offset`, and `kv_rank` 0 and 1",
    )


def _route_to(address: str, port: int) -> str:
    """This host's own address on the way to another one. Sends nothing: a datagram socket only looks at its routes."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            host = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"`kv_ip` is `{address}`, to which there is no way: {error}", operation=_OPERATION) from error
    return _host(host)
