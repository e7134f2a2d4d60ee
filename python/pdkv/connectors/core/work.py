"""What the scheduler side orders of every worker rank for one step, and what a rank reports.

Plain values only: an LLM engine carries these between its own processes in whatever form it likes. Knows nothing of
how an order is carried out. Groups are the engine's groups of layers that share block ids; most models have one. The
layers of a group are in one cache, or in several where they differ in shape or type.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

__all__ = [
    "Decline",
    "ExportOrder",
    "ProducerAddress",
    "PullOrder",
    "RankInfo",
    "Refusal",
    "Results",
    "Watch",
    "Work",
]

# One JSON text of `pdkv.Reference` for each rank (by rank) and each of its caches, those of the first group first.
References = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class ProducerAddress:
    """Where a producer's ranks can be asked for, as the request's parameters name it.

    Attributes:
        engine_id: The LLM engine that says it holds the blocks.
        host: Host of its directory.
        port: Port of its directory.
    """

    engine_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a rank tells its scheduler side once, at start-up. Holds secrets: it stays within the LLM engine.

    Attributes:
        tp_rank: Position among the ranks that share the heads.
        pp_rank: Position among the ranks that share the layers.
        address: `host:port` of its pdkv engine.
        incarnation: Life of its pdkv engine.
        issuers: For each cache, `Issuer.to_bytes()`.
        groups: For each cache, what a consumer compares: see `directory`.
        cache_groups: For each cache, the group that it belongs to; empty where each group has one.
    """

    tp_rank: int
    pp_rank: int
    address: str
    incarnation: str
    issuers: tuple[bytes, ...] = field(repr=False)
    groups: tuple[dict[str, object], ...]
    cache_groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """Pin these blocks for whoever holds the references.

    Attributes:
        request_id: The request whose blocks they are.
        references: For each rank and cache.
        block_ids: For each group, in the order of the tokens.
        lease_s: First lease, in seconds.
        step: The last step that wrote into them. Where a device works behind the LLM engine's back they are pinned when
            it has done that; 0 is no step.
    """

    request_id: str
    references: References
    block_ids: tuple[tuple[int, ...], ...]
    lease_s: float
    step: int = 0


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Fetch blocks from a producer.

    Attributes:
        request_id: The request that waits for them.
        producer: Whom to ask.
        references: For each rank and cache of the producer.
        digest: Digest that this side computed; the owner compares it before a byte moves.
        into: For each group, the destination blocks. Empty where a group needs none.
        first_blocks: For each group, the position within the export of the first block.
        num_tokens: Tokens that the blocks stand for, for statistics.
    """

    request_id: str
    producer: ProducerAddress
    references: References
    digest: bytes
    into: tuple[tuple[int, ...], ...]
    first_blocks: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request whose parameters can't be believed: report its load as failed.

    Attributes:
        request_id: The request.
        kind: Kind of the error, as in `pdkv.errors`.
        reason: One sentence for the log.
        blocks: Blocks that were meant to be filled: some LLM engines know a failed load by them.
    """

    request_id: str
    kind: str
    reason: str
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decline:
    """Tell the producer that nobody will come for an export.

    Attributes:
        producer: Whom to tell.
        references: For each rank and cache of the producer.
    """

    producer: ProducerAddress
    references: References


@dataclass(frozen=True, slots=True)
class Watch:
    """Keep a lease alive until the request's pull has ended or an `unwatch` names the request.

    Attributes:
        request_id: The request that waits.
        producer: Who holds the blocks.
        references: For each rank and cache of the producer.
        lease_s: Seconds to ask for at each renewal.
    """

    request_id: str
    producer: ProducerAddress
    references: References
    lease_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that one step brings.

    Attributes:
        exports: Blocks to pin.
        pulls: Blocks to fetch.
        refusals: Loads to report as failed.
        declines: Exports to give back.
        watches: Leases to keep alive from now on.
        unwatches: Ids of requests whose lease is left alone from now on.
        cancels: Ids of requests whose pull is not wanted any more; it is still reported when it has ended.
    """

    NOTHING: ClassVar[Work]

    exports: tuple[ExportOrder, ...] = ()
    pulls: tuple[PullOrder, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    declines: tuple[Decline, ...] = ()
    watches: tuple[Watch, ...] = ()
    unwatches: tuple[str, ...] = ()
    cancels: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.exports
            or self.pulls
            or self.refusals
            or self.declines
            or self.watches
            or self.unwatches
            or self.cancels
        )


Work.NOTHING = Work()


@dataclass(slots=True)
class Results:
    """What has ended at a rank since it was last asked. Each request stands in `sent` or `received` exactly once.

    Attributes:
        sent: Requests whose exported blocks are free again.
        received: Requests whose load has ended, well or not, so that their blocks may be used.
        failed: Those of `received` whose blocks do not hold what was asked for.
        failed_blocks: Destination block ids of the failed loads.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
