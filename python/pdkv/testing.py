"""Help for tests of code that uses pdkv: two connected engines, and the seeded simulator of the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pdkv._core import Engine, Peer, simulate

__all__ = ["History", "Pair", "connected_pair", "simulated"]


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


class History(NamedTuple):
    """What happened in one simulated world.

    Attributes:
        seed: Replays it.
        violations: Promises that were broken; empty is the only good value.
        begun: Transfers begun.
        done: Transfers that ended valid.
        failed: Transfers that failed.
        cancelled: Transfers that were cancelled.
        crashed: Transfers that died with their engine.
        filled: Offers that were filled.
        exports_ended: Exports and offers that ended, however.
        messages: Messages delivered.
        crashes: Engines killed.
    """

    seed: int
    violations: list[str]
    begun: int
    done: int
    failed: int
    cancelled: int
    crashed: int
    filled: int
    exports_ended: int
    messages: int
    crashes: int


def simulated(
    seed: int,
    *,
    engines: int = 3,
    exports: int = 12,
    blocks: int = 48,
    layers: int = 2,
    span_s: float = 6.0,
    faults: bool = True,
) -> History:
    """Runs the real protocol code in a simulated world on virtual time: no socket, no thread, no clock.

    Args:
        seed: One seed is one history.
        engines: Engines in the world.
        exports: Exports and offers made over the whole run.
        blocks: Blocks of each engine's cache.
        layers: Layers of the caches.
        span_s: Virtual seconds in which things are begun.
        faults: Whether messages are lost, doubled and delayed, channels cut and engines killed, in a mix
            that differs from seed to seed.

    Returns:
        What happened.
    """
    return History(
        **simulate(seed, engines=engines, exports=exports, blocks=blocks, layers=layers, span_s=span_s, faults=faults)
    )
