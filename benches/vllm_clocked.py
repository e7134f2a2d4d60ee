"""`PdkvConnector` with a clock: notes when vLLM called it, for `vllm_timeline.py`. Runs within vLLM's processes.

A note is one line of JSON in a file that all processes of a server append to: the time on the clock that all processes
of a machine share, what happened, and whose it was. Steps that compute nothing are not noted, only counted.

vLLM's processes look for the next message without a pause for a second after each (`SpinCondition`). While the file
beside it says so they sleep until it comes instead.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm_setups import NOTES, SLEEP

from pdkv.connectors.core.load import Load
from pdkv.connectors.vllm import PdkvConnector, PdkvMetadata

__all__ = ["ClockedConnector"]


def _obey(file: str) -> None:
    with Path(file + SLEEP).open("rb") as neighbour:
        told = mmap.mmap(neighbour.fileno(), 1, access=mmap.ACCESS_READ)
    wait = SpinCondition.wait

    def obedient(condition: Any, timeout_ms: int | None = None) -> None:
        if told[0]:
            condition.last_read = 0.0  # long ago
        wait(condition, timeout_ms)

    SpinCondition.wait = obedient


if NOTES in os.environ:
    _obey(os.environ[NOTES])


class ClockedConnector(PdkvConnector):
    """The connector, and a note of each call that begins or ends something."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._notes = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._empty = 0

    def note(self, what: str, ids: Any = (), **more: Any) -> None:
        """Notes that something happened just now."""
        line = {"at": time.monotonic(), "what": what, "ids": sorted(ids), **more}
        os.write(self._notes, json.dumps(line).encode() + b"\n")

    # Scheduler side.

    def on_new_request(self, request: Any) -> None:
        """The request has come through vLLM's front."""
        if request.request_id not in self._arrived:
            self.note("arrived", [request.request_id])
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """A step begins."""
        metadata: Any = super().build_connector_meta(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        self._empty += not scheduled
        if scheduled:
            self.note("scheduled", scheduled, empty=self._empty)
            self._empty = 0
            metadata.computes = sorted(scheduled)
        return metadata

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """The request is over."""
        found = super().request_finished_all_groups(request, block_ids)
        self.note("finished", [request.request_id], kept=found[0])
        return found

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Has transfers noted, too."""
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        pulls: Any = self._worker._pulls
        original = pulls._note

        def noted(load: Load, group: int, transfer: Any) -> None:
            figures = transfer.stats
            named = ("plan_us", "post_us", "wire_us", "handover_us", "bytes")
            self.note("moved", [load.request_id], **{name: getattr(figures, name) for name in named})
            original(load, group, transfer)

        pulls._note = noted

    def _carry(self, metadata: Any) -> None:
        orders = metadata.work if isinstance(metadata, PdkvMetadata) and metadata is not self._carried else None
        before = time.monotonic()
        super()._carry(metadata)
        if orders and (orders.pulls or orders.exports):
            ids = [order.request_id for order in (*orders.pulls, *orders.exports)]
            self.note("carried", ids, took=time.monotonic() - before, exports=len(orders.exports))

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """A step is over at the worker."""
        computed = getattr(self._connector_metadata, "computes", None)
        if computed:
            self.note("computed", computed)
        results = super().get_transfer_results(finished_req_ids)
        if ended := {*(results.finished_recving or ()), *(results.finished_sending or ())}:
            self.note("ended", ended)
        return results
