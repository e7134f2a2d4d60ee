"""What the proxy counts, in Prometheus' text format. Names and labels; knows no requests.

Every series of an instance is there from the start, at zero. Labels come from the configuration and from closed sets,
never from a client.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdkv.proxy.answers import Answer

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The counters of one proxy, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by how they ended.", "endpoint", "outcome")
        self.legs = self._counter(
            "legs", "Requests sent to instances, by how they ended.", "role", "instance", "outcome"
        )
        self.retries = self._counter("retries", "Legs repeated after a failure.", "role")
        self.alone = self._counter("decode_only", "Requests sent to a decode instance alone, by reason.", "reason")
        self.returns = self._counter("returns", "KV given back, by whether its producer was told.", "outcome")
        self.in_flight = self._gauge("in_flight_requests", "Legs that run now.", "role", "instance")
        self.in_flight_tokens = self._gauge("in_flight_tokens", "Estimated prompt tokens of them.", "role", "instance")
        self.healthy = self._gauge("instance_healthy", "Whether the instance takes part.", "role", "instance")
        self.prefill_seconds = self._histogram("prefill_seconds", "Time from a request to the end of its prefill leg.")
        self.first_byte_seconds = self._histogram(
            "first_byte_seconds", "Time from a request to the first byte of its answer's body."
        )

    def render(self) -> Answer:
        """The page that Prometheus scrapes."""
        return Answer(200, generate_latest(self._registry), CONTENT_TYPE_LATEST)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdkv_proxy_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"pdkv_proxy_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"pdkv_proxy_{name}", text, registry=self._registry, buckets=_SECONDS)
