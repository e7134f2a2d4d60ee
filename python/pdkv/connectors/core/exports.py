"""Blocks that this rank has pinned for consumers, and which requests' blocks are free again.

Used by one thread. Knows no consumer and no connection.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdkv.connectors.core.device import Steps
from pdkv.connectors.core.load import Kit
from pdkv.connectors.core.shown import shown
from pdkv.connectors.core.work import ExportOrder, Results
from pdkv.errors import LayoutError, PdkvError

if TYPE_CHECKING:
    from pdkv.engine import Export, KvCache, Reference

__all__ = ["Exports"]

_log = logging.getLogger("pdkv.connectors")


class _Sending:
    """A request with pinned blocks. One that is ordered twice ends once, when all that is pinned for it has."""

    __slots__ = ("expired", "left", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.left = 0
        self.expired = False


class Exports:
    """All exports of one rank.

    Args:
        kit: What the rank's parts share.
        steps: How far the rank's device is, unless it is the CPU.
    """

    def __init__(self, kit: Kit, steps: Steps | None = None) -> None:
        self._steps = steps
        # Until the device has written what they are to pin. They are looked at in each step: an LLM engine goes on
        # stepping, with nothing to compute if need be, while it keeps blocks for somebody.
        self._held = list[ExportOrder]()
        self._engine, self._caches, self._stats = kit.engine, kit.caches, kit.stats
        self._groups, self._num_groups = kit.groups, kit.num_groups
        self._rank = kit.place.rank
        self._requests = dict[str, _Sending]()
        self._exports: dict[str, tuple[Export, _Sending]] = {}  # by the id of the export
        self._ended = list[str]()  # ended, but perhaps not quiet yet
        self._refused = list[str]()

    def begin(self, order: ExportOrder) -> None:
        """Pins the blocks of an order, once they hold what is promised. A claim that comes before waits at the engine.

        If that can't be, the request is reported at once, so that they are freed.
        """
        if self._steps is None or not order.step or self._steps.over(order.step):
            self._pin(order)
        else:
            self._held.append(order)

    def _pin(self, order: ExportOrder) -> None:
        sending = self._requests.get(order.request_id) or _Sending(order.request_id)
        made: list[Export] = []
        try:
            for cache, reference, block_ids in self._parts(order):
                export = cache.export(block_ids, reference=reference, lease_s=order.lease_s)
                made.append(export)
                self._exports[export.reference.export_id] = (export, sending)
        except PdkvError as error:
            self._stats.count("num_failed_exports")
            _log.error("request `%s` is not exported (%s): %s", shown(order.request_id), error.kind, error.message)
            for export in made:
                export.release()
        sending.left += len(made)
        if sending.left:
            self._requests[order.request_id] = sending
        else:
            self._refused.append(order.request_id)

    def give_up(self, order: ExportOrder) -> None:
        """Reports a request whose blocks are not pinned."""
        if order.request_id not in self._requests:
            self._refused.append(order.request_id)

    def release(self, reference: Reference) -> None:
        """Ends an export of this engine that nobody will come for; does nothing unless the reference is its own."""
        for order in [order for order in self._held if reference.to_json() in self._own(order)]:
            self._held.remove(order)
            self.give_up(order)
        export, _ = self._exports.get(reference.export_id, (None, None))
        if export is not None and export.reference == reference:
            export.release()

    def collect(self, results: Results) -> None:
        """Adds the requests whose blocks are free again. Takes time for what has ended only."""
        if self._held and self._steps is not None:
            for order in [order for order in self._held if self._steps.over(order.step)]:
                self._held.remove(order)
                try:
                    self._pin(order)
                except Exception:
                    self.give_up(order)
                    raise
        if self._refused:
            results.sent.update(self._refused)
            self._refused.clear()
        if not self._exports:
            return
        ended = self._ended + self._engine.take_ended()
        self._ended = []
        for export_id in ended:
            export, sending = self._exports.get(export_id, (None, None))
            if export is None or sending is None:
                continue  # of an order that failed and was reported
            if not export.quiesced:
                self._ended.append(export_id)
                continue
            del self._exports[export_id]
            sending.expired |= export.state == "expired"
            sending.left -= 1
            if not sending.left:
                del self._requests[sending.request_id]
                results.sent.add(sending.request_id)
                self._stats.count("num_kv_expired_reqs", int(sending.expired))

    def close(self) -> None:
        """Ends all exports, and makes none of those that wait."""
        self._held.clear()
        for export, _ in self._exports.values():
            export.release()

    def _parts(self, order: ExportOrder) -> list[tuple[KvCache, str, tuple[int, ...]]]:
        references = self._own(order)
        if (len(references), len(order.block_ids)) != (len(self._caches), self._num_groups):
            raise LayoutError(
                f"`{len(references)}` references and `{len(order.block_ids)}` lists of blocks came for "
                f"`{len(self._caches)}` caches of `{self._num_groups}` groups",
                operation="export",
            )
        block_ids = (order.block_ids[group] for group in self._groups)
        parts = zip(self._caches, references, block_ids, strict=True)
        # A group whose window has left all blocks behind has nothing to pin.
        return [part for part in parts if part[2]]

    def _own(self, order: ExportOrder) -> tuple[str, ...]:
        """The references of this rank."""
        return order.references[self._rank] if self._rank < len(order.references) else ()
