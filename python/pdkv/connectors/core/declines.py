"""Tells producers that nobody will come for an export, so that they need not wait for its lease to end.

Never blocks and raises nothing: what can't be told, the lease will tell.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pdkv.connectors.core.dial import Dialler, Job
from pdkv.connectors.core.load import Kit, own_references
from pdkv.connectors.core.work import Decline, ProducerAddress
from pdkv.errors import PdkvError

if TYPE_CHECKING:
    from pdkv.engine import Peer, Reference

__all__ = ["Declines"]

_log = logging.getLogger("pdkv.connectors")


class Declines:
    """All that this rank declines.

    Args:
        kit: What the rank's parts share.
        dialler: Who reaches producers.
        release: Ends an export of this very engine: it does not connect to itself.
    """

    def __init__(self, kit: Kit, dialler: Dialler, release: Callable[[Reference], None]) -> None:
        self._kit, self._dialler, self._release = kit, dialler, release

    def order(self, order: Decline) -> None:
        """Declines this rank's share of an export."""
        try:
            own = own_references(order.references, self._kit)
        except PdkvError as error:
            self._failed(1, error)
            return
        self.decline(order.producer, own)

    def decline(self, producer: ProducerAddress, references: Sequence[Reference]) -> None:
        """Declines exports of one producer."""
        references = [reference for reference in references if reference.num_blocks]
        if not references:
            return
        incarnation = references[0].incarnation
        if incarnation == self._kit.engine.incarnation:
            for reference in references:
                self._release(reference)
            self._kit.stats.count("num_declined", len(references))
            return
        peer = self._dialler.ready(producer, incarnation)
        if peer is not None:
            self.tell(peer, references)
            return
        job = Job(
            incarnation,
            time.monotonic() + self._kit.settings.connect_timeout,
            run=lambda peer: self.tell(peer, references),
            fail=lambda error: self._failed(len(references), error),
        )
        self._dialler.submit(producer, job, urgent=False)

    def tell(self, peer: Peer, references: Sequence[Reference]) -> None:
        """Declines exports of a connected producer."""
        for reference in references:
            try:
                peer.reject(reference)
            except PdkvError as error:
                self._failed(1, error)
            else:
                self._kit.stats.count("num_declined")

    def _failed(self, number: int, error: PdkvError) -> None:
        self._kit.stats.count("num_failed_notifications", number)
        _log.debug("`%d` exports could not be declined (%s): %s", number, error.kind, error.message)
