"""Gives KV back that no decode leg will fetch, so that its prefill instance need not keep it until the lease is over.

Beside the loop: a thread tells the producer, which may be slow or gone. Nobody waits for it, and what can't be told the
lease will tell. Parameters of other connectors than pdkv's are left alone. The only part of the proxy that looks into
`kv_transfer_params`, and it leaves that to the connector's `core`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any

from pdkv.errors import PdkvError
from pdkv.proxy.metrics import Metrics

if TYPE_CHECKING:
    from pdkv.connectors.core.returner import Returner

_LOG = logging.getLogger("pdkv.proxy")

# What waited longer than this, behind instances that do not answer, is left to its lease.
_PATIENCE_S = 20.0
# How long the proxy's end may take on account of what is still to be told, and again for what is being told.
_LAST_S = 2.0
# How long one producer may take at most, so that one that is gone does not use up the patience of all.
_EACH_S = 2.0
# What may wait to be told; the lease tells the rest.
_MOST_WAITING = 1000


class Returns:
    """Takes parameters back; may be used from one event loop."""

    def __init__(self, metrics: Metrics, timeout_s: float, allowed: Iterable[str] | None = None) -> None:
        """Starts nothing.

        Args:
            metrics: Where to count.
            timeout_s: How long one producer may take; no more than two seconds.
            allowed: Hosts and networks that parameters may lead to; `None` is any.
        """
        self._metrics, self._timeout_s, self._allowed = metrics, timeout_s, allowed
        self._thread = ThreadPoolExecutor(1, "pdkv-proxy-returns")
        self._returner: Returner | None = None
        self._last: float | None = None
        self._waiting, self._lock = 0, Lock()

    def give(self, params: Mapping[str, Any]) -> None:
        """Takes what a prefill instance answered and nobody has used. Never blocks and raises nothing."""
        if self._last is not None:
            return
        with self._lock:
            full = self._waiting >= _MOST_WAITING
            self._waiting += not full
        try:
            if full:
                raise RuntimeError("too many wait")
            self._thread.submit(self._give, params, time.monotonic() + _PATIENCE_S)
        except RuntimeError:  # or no thread can be started
            self._metrics.returns.labels("failed").inc()

    def close(self) -> None:
        """Tells what is still to be told, for four seconds at most. Blocks."""
        self._last = time.monotonic() + _LAST_S
        self._thread.shutdown()
        if self._returner is not None:
            self._returner.close()

    def _give(self, params: Mapping[str, Any], deadline: float) -> None:
        with self._lock:
            self._waiting -= 1
        try:
            left = min(self._timeout_s, _EACH_S, min(deadline, self._last or deadline) - time.monotonic())
            if left <= 0:
                raise TimeoutError("others took the time for it")
            if self._returner is None:
                from pdkv.connectors.core.returner import Returner

                self._returner = Returner(self._allowed)
            if not self._returner.give(params, left):
                return
        except (PdkvError, OSError) as error:
            _LOG.info("a prefill instance was not told that its KV is not wanted, its lease will end: %s", error)
            outcome = "failed"
        except Exception:  # noqa: BLE001 - nothing here may end the thread
            _LOG.exception("KV could not be given back: a bug")
            outcome = "failed"
        else:
            outcome = "told"
        self._metrics.returns.labels(outcome).inc()
