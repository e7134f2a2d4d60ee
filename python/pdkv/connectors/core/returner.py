"""Gives exports back that nobody will fetch, from outside of any LLM engine: whoever holds the parameters may say so.

For a router: it knows at once when the second leg of a request will not come, and the producer only when the lease is
over. Believes the parameters no more than a consumer does; the owner of the exports compares them. Blocks, and is
used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

from pdkv.connectors.core.inquiry import Ranks, fetch
from pdkv.connectors.core.places import Places
from pdkv.connectors.core.reading import exports_of
from pdkv.connectors.core.work import ProducerAddress
from pdkv.engine import Engine, Peer, Reference
from pdkv.errors import PdkvError, ReferenceRestartedError, StaleReferenceError

__all__ = ["Returner"]

_OPERATION = "give back"
# What is asked for when the owner is asked whether it has heard: no more than it takes to answer.
_MOMENT_S = 0.001
# Connections that are kept; a producer has one for each rank.
_MOST_PEERS = 256


class Returner:
    """Everything that one router gives back. Its engine is started when the first is.

    Args:
        allowed: Hosts and networks that it may go to, as `Places` takes them; `None` is any.
    """

    def __init__(self, allowed: Iterable[str] | None = None) -> None:
        self._places = Places(allowed)
        self._engine: Engine | None = None
        self._peers = dict[str, Peer]()  # by the life of the engine that they reach

    def give(self, params: Mapping[str, Any], timeout_s: float) -> bool:
        """Tells every rank of the producer that nobody comes for what the parameters name.

        What somebody fetches just now is not disturbed, and what has ended stays as it is.

        Args:
            params: What a producer answered.
            timeout_s: How long it may take in all. A rank that does not answer takes its share of it and no more.

        Returns:
            Whether the producer has heard it. `False` if the parameters are not pdkv's.

        Raises:
            PdkvError: The producer, or one of its ranks, can't be told; the others have been. What it keeps is freed
                when its lease is over.
        """
        named = exports_of(params)
        if named is None:
            return False
        producer, ranks = named
        end = time.monotonic() + timeout_s
        directory = _Directory(producer, self._places, end - timeout_s / 2)
        failure: PdkvError | None = None
        for at, texts in enumerate(ranks):
            share = _left(end) / (len(ranks) - at)
            try:
                self._tell(directory, tuple(map(Reference.from_json, texts)), time.monotonic() + share)
            except PdkvError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return True

    def close(self) -> None:
        """Ends its engine and all connections."""
        engine, self._engine = self._engine, None
        self._peers.clear()
        if engine is not None:
            engine.close()

    def _tell(self, directory: _Directory, references: tuple[Reference, ...], end: float) -> None:
        """Tells one rank."""
        references = tuple(reference for reference in references if reference.num_blocks)
        if not references:
            return
        peer = self._peer(directory, references[0].incarnation, end)
        for reference in references:
            peer.reject(reference)
        _await_answer(peer, references[-1], end)

    def _peer(self, directory: _Directory, incarnation: str, end: float) -> Peer:
        peer = self._peers.get(incarnation)
        if peer is not None and peer.alive:
            return peer
        producer, told = directory.producer, directory.ask()
        rank = next((rank for rank in told.ranks if rank.incarnation == incarnation), None)
        if rank is None:
            raise ReferenceRestartedError(
                f"no rank of the producer at `{producer.host}:{producer.port}` has incarnation `{incarnation}`",
                operation=_OPERATION,
                hint="it was restarted, and keeps nothing of before",
            )
        if self._engine is None:
            # A rejection is a message and moves nothing, so no other way to the producer is looked for.
            self._engine = Engine("pdkv-returns", listen=None, transports=["tcp"], threads=1)
        address = self._places.engine_address(rank.address, producer.host, told.host)
        self._peers = {life: other for life, other in self._peers.items() if other.alive}
        while len(self._peers) >= _MOST_PEERS:
            self._peers.pop(next(iter(self._peers))).close()
        peer = self._engine.connect(address, timeout_s=_left(end))
        if peer.incarnation != incarnation:
            peer.close()
            raise ReferenceRestartedError(
                f"at `{address}` is incarnation `{peer.incarnation}`, and its directory says `{incarnation}`",
                operation=_OPERATION,
                hint="it was restarted, and keeps nothing of before",
            )
        self._peers[incarnation] = peer
        return peer


class _Directory:
    """The directory of one producer, asked once for all of its ranks."""

    def __init__(self, producer: ProducerAddress, places: Places, end: float) -> None:
        self.producer = producer
        self._places, self._end = places, end
        self._told: Ranks | PdkvError | None = None

    def ask(self) -> Ranks:
        """What it tells.

        Raises:
            PdkvError: It may not be asked, or did not answer.
        """
        if self._told is None:
            try:
                self._places.check_directory(self.producer.host)
                self._told = fetch(self.producer.host, self.producer.port, _left(self._end))
            except PdkvError as error:
                self._told = error
        if isinstance(self._told, PdkvError):
            raise self._told.with_traceback(None)
        return self._told


def _await_answer(peer: Peer, reference: Reference, end: float) -> None:
    """Asks for what was just given back: messages are answered in order, so the answer says that all were heard."""
    with contextlib.suppress(StaleReferenceError):  # it has ended
        peer.renew(reference, _MOMENT_S, timeout_s=_left(end))


def _left(end: float) -> float:
    return max(end - time.monotonic(), _MOMENT_S)
