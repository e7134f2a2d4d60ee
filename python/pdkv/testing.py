"""Help for tests of code that uses pdkv: two connected engines, and patterns that name their origin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pdkv._core import Engine, Peer

__all__ = ["Pair", "connected_pair"]


class Pair(NamedTuple):
    """Two engines of this process that are connected both ways.

    Attributes:
        producer: The engine that exports.
        consumer: The engine that pulls.
        to_producer: The consumer's connection.
        to_consumer: The producer's connection.
    """

    producer: Engine
    consumer: Engine
    to_producer: Peer
    to_consumer: Peer


@contextmanager
def connected_pair(**settings: Any) -> Iterator[Pair]:
    """Starts two engines, connects them both ways, and closes them at the end.

    Args:
        **settings: Settings of both engines, for example `transports=["tcp"]`.

    Yields:
        The engines and their connections.
    """
    with Engine("producer", **settings) as producer, Engine("consumer", **settings) as consumer:
        assert producer.address is not None
        assert consumer.address is not None
        yield Pair(producer, consumer, consumer.connect(producer.address), producer.connect(consumer.address))
