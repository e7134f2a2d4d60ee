"""Statistics of transfers in vLLM's own log line and Prometheus metrics: `vllm:pdkv_*`.

Names end as NIXL's do, so that dashboards need one word changed. What is counted is `core.stats`'s; nothing here can
fail a transfer: a value that can't be shown is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pdkv.connectors.core import stats

__all__ = ["PdkvMetrics", "PdkvStats"]

_log = logging.getLogger("pdkv.connectors")
_SECONDS = [0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 5, 30]
_HISTOGRAMS: dict[str, tuple[str, list[float]]] = {
    "xfer_time_seconds": ("Seconds from the order of a load to its end.", _SECONDS),
    "post_time_seconds": ("Seconds of planning and posting a transfer.", [value / 10 for value in _SECONDS]),
    "bytes_transferred": ("Bytes of a transfer.", [float(2 ** (10 + 2 * step)) for step in range(1, 13)]),
    "num_descriptors": (
        "Copies that a transfer consisted of.",
        [1, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000],
    ),
}
_COUNTERS = {
    "num_failed_transfers": "Loads of which a transfer failed.",
    "num_failed_notifications": "Renewals and declines that the producer did not get.",
    "num_kv_expired_reqs": "Exports for which no consumer came in time, on the producer.",
    "num_notifications_after_expiry": "Loads that came after their lease had ended.",
    "num_refused_references": "Loads whose reference or parameters were refused: forged, stale, or of another prompt.",
    "num_recomputed_requests": "Loads that failed and were given back to vLLM to recompute; 0 with the policy fail.",
    "num_fenced_reads": "Loads refused after bytes had moved, because the producer had taken the blocks back.",
    "num_declined": "Exports given back without a load.",
    "num_cancelled": "Loads cancelled because their request was aborted.",
    "num_failed_exports": "Exports that could not be made.",
}


@dataclass
class PdkvStats(KVConnectorStats):
    """What ranks have counted; `data` is plain lists, numbers and one mapping."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fills what is missing."""
        self.data = stats.aggregate(self.data or {}, {})

    def reset(self) -> None:
        """Forgets everything."""
        self.data = stats.aggregate({}, {})

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds another rank's or step's."""
        self.data = stats.aggregate(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line's worth."""
        return stats.reduce(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class PdkvMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of one front end, by engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = per_engine_labelvalues
        self._histograms = {
            name: self._of_each(metric_types[Histogram], name, text, labelnames, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: self._of_each(metric_types[Counter], name, text, labelnames) for name, text in _COUNTERS.items()
        }
        self._paths = metric_types[Counter](
            name="vllm:pdkv_num_transfers",
            documentation="Transfers that succeeded, by the path that the bytes took.",
            labelnames=[*labelnames, "path"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what one engine's ranks have counted."""
        try:
            for name, histogram in self._histograms.items():
                for value in transfer_stats_data.get(name, ()):
                    histogram[engine_idx].observe(value)
            for name, counter in self._counters.items():
                counter[engine_idx].inc(transfer_stats_data.get(name, 0))
            for path, number in transfer_stats_data.get("paths", {}).items():
                self._paths.labels(*self._labels[engine_idx], path).inc(number)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            _log.warning("statistics of transfers can't be shown: %s", error)

    def _of_each(
        self, make: Callable[..., Any], name: str, text: str, labelnames: list[str], **how: Any
    ) -> dict[int, Any]:
        metric = make(name=f"vllm:pdkv_{name}", documentation=text, labelnames=labelnames, **how)
        return {engine: metric.labels(*values) for engine, values in self._labels.items()}
