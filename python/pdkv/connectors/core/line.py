"""The connection of one rank to the same rank of one producer: made, checked, and made again when it was lost.

Blocks; each line is used by one thread at a time, which `dial` sees to. Only `peer` may be read by others meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdkv.connectors.core.caches import GroupFacts, compare
from pdkv.connectors.core.inquiry import Ranks, ToldRank, fetch
from pdkv.connectors.core.places import Places
from pdkv.connectors.core.shown import shown
from pdkv.connectors.core.work import ProducerAddress
from pdkv.errors import HandshakeError, LayoutError, PdkvError, ReferenceRestartedError, TransferTimeoutError

if TYPE_CHECKING:
    from pdkv.engine import Engine, Peer

__all__ = ["Line", "Place"]

_OPERATION = "dial"
# How long what was found out about a producer is believed, good or bad: a storm of requests asks once.
_BELIEVED_S = (0.2, 2.0)


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank this is, and what its caches are: what must be found equal at the other end.

    Attributes:
        tp_rank: Position among the ranks that share the heads.
        tp_size: How many those are.
        pp_rank: Position among the ranks that share the layers.
        pp_size: How many those are.
        groups: What the caches mean.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    groups: Sequence[GroupFacts]

    @property
    def rank(self) -> int:
        """Position among all."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.pp_size * self.tp_size


class Line:
    """One producer.

    Args:
        producer: Which.
        engine: This rank's engine.
        place: Which rank this is. It connects to the same rank of the producer.
        places: Where it may connect.
        connect_timeout_s: The longest to try at once.
    """

    def __init__(
        self, producer: ProducerAddress, engine: Engine, place: Place, places: Places, connect_timeout_s: float
    ) -> None:
        self.producer = producer
        self.peer: Peer | None = None
        self.proven = False  # whether it was ever reached
        self.used_at = time.monotonic()
        self._engine, self._place, self._places = engine, place, places
        self._timeout_s = connect_timeout_s
        self._failure: PdkvError | None = None
        self._known: str | None = None  # the incarnation that the directory told last
        self._believed_until = 0.0

    def ready(self, incarnation: str) -> Peer | None:
        """The connection to this life of the producer's engine, if there is one. Never blocks."""
        peer = self.peer
        if peer is None or not peer.alive or peer.incarnation != incarnation:
            return None
        self.used_at = time.monotonic()
        return peer

    def reach(self, incarnation: str, deadline: float) -> Peer:
        """Gives the connection to this life of the producer's engine, and makes it if need be.

        Raises:
            PeerUnreachableError: Nobody answers in time, or the host may not be dialled.
            HandshakeError: Whoever answers is no producer.
            StaleReferenceError: The producer, or its engine, is another one by now.
            LayoutError: Its ranks or caches do not fit to these; names every difference.
        """
        now = self.used_at = time.monotonic()
        if (peer := self.ready(incarnation)) is not None:
            return peer
        if now < self._believed_until:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            # While its connection stands; one that is gone may have been restarted just now.
            if self._known not in (None, incarnation) and self.ready(str(self._known)) is not None:
                raise _restarted("incarnation", incarnation, str(self._known))
        self._failure = None
        try:
            return self._dial(incarnation, min(deadline, now + self._timeout_s))
        except PdkvError as error:
            # Neither another life of the engine nor the haste of this request is the line's fault.
            if "incarnation" not in error.context and time.monotonic() < deadline:
                self._failure = error
            raise
        finally:
            took = time.monotonic() - now
            self._believed_until = time.monotonic() + min(max(took, _BELIEVED_S[0]), _BELIEVED_S[1])

    def close(self) -> None:
        """Ends the connection; transfers over it fail."""
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.close()

    def _dial(self, incarnation: str, end: float) -> Peer:
        producer = self.producer
        self._places.check_directory(producer.host)
        told = fetch(producer.host, producer.port, _left(end, producer))
        if told.engine_id != producer.engine_id:
            raise _restarted("engine_id", producer.engine_id, told.engine_id)
        rank = self._same_rank(told)
        compare(self._place.groups, rank.groups, f"`{shown(producer.engine_id)}`")
        self._known = rank.incarnation
        if rank.incarnation != incarnation:
            raise _restarted("incarnation", incarnation, rank.incarnation)
        address = self._places.engine_address(rank.address, producer.host, told.host)
        peer = self._engine.connect(address, timeout_s=_left(end, producer))
        if peer.incarnation != incarnation:
            peer.close()
            raise _restarted("incarnation", incarnation, peer.incarnation)
        self.close()
        self.peer, self.proven = peer, True
        return peer

    def _same_rank(self, told: Ranks) -> ToldRank:
        mine = self._place
        tp_size = 1 + max((rank.tp_rank for rank in told.ranks), default=-1)
        pp_size = 1 + max((rank.pp_rank for rank in told.ranks), default=-1)
        if (tp_size, pp_size) != (mine.tp_size, mine.pp_size):
            raise LayoutError(
                f"the ranks do not fit: tp_size is `{mine.tp_size}` here and `{tp_size}` there, "
                f"pp_size is `{mine.pp_size}` here and `{pp_size}` there",
                operation=_OPERATION,
                context={"tp_size": f"{mine.tp_size} here, {tp_size} there", "pp_size": f"{mine.pp_size}, {pp_size}"},
                hint="this release moves blocks between engines with equal parallel sizes only",
            )
        found = [rank for rank in told.ranks if (rank.tp_rank, rank.pp_rank) == (mine.tp_rank, mine.pp_rank)]
        if len(found) != 1 or len(told.ranks) != mine.size:
            raise HandshakeError(
                f"the directory tells `{len(told.ranks)}` ranks, of which `{len(found)}` are rank `{mine.rank}`",
                operation=_OPERATION,
            )
        return found[0]


def _restarted(what: str, wanted: str, found: str) -> ReferenceRestartedError:
    return ReferenceRestartedError(
        f"the reference is for {what} `{shown(wanted)}`, but `{shown(found)}` answers there",
        operation=_OPERATION,
        context={what: f"{shown(wanted)} wanted, {shown(found)} found"},
        hint="the producer was restarted, or another one is at its address: the prefix must be computed again",
    )


def _left(end: float, producer: ProducerAddress) -> float:
    left = end - time.monotonic()
    if left <= 0:
        where = f"`{shown(producer.host)}:{producer.port}`"
        raise TransferTimeoutError(f"no time is left to reach the producer at {where}", operation=_OPERATION)
    return left
