"""One load: the references, transfers and fate of one pull order at this rank. Holds state; `pulls` moves it on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.device import Device
from pdkv.connectors.core.line import Place
from pdkv.connectors.core.stats import Stats
from pdkv.connectors.core.work import PullOrder, References
from pdkv.engine import Reference
from pdkv.errors import LayoutError, PdkvError, ReferenceFingerprintError, TransferTimeoutError

if TYPE_CHECKING:
    from pdkv.engine import Engine, KvCache, Peer, Transfer

__all__ = ["Kit", "Load", "own_references"]

_OPERATION = "load"


@dataclass(frozen=True, slots=True)
class Kit:
    """What a rank's parts share.

    Attributes:
        engine: The rank's engine.
        caches: All of them.
        groups: For each cache, the group whose block ids it has.
        num_groups: Groups that there are; this rank may have layers of fewer.
        place: Which rank it is.
        settings: What the user set.
        stats: Where to count.
        device: Where the caches are, unless it is the CPU's memory.
    """

    engine: Engine
    caches: Sequence[KvCache]
    groups: Sequence[int]
    num_groups: int
    place: Place
    settings: Settings
    stats: Stats
    device: Device | None = None


def own_references(references: References, kit: Kit) -> tuple[Reference, ...]:
    """Reads the references of this rank, one a cache. Where one is for no blocks there is no export.

    Raises:
        LayoutError: They are for another number of ranks or caches.
        ConfigError: One is no reference.
    """
    if len(references) != kit.place.size:
        raise LayoutError(
            f"there are references for `{len(references)}` ranks, but `{kit.place.size}` ranks here",
            operation=_OPERATION,
            hint="this release moves blocks between engines with equal parallel sizes only",
        )
    own = references[kit.place.rank]
    if len(own) != len(kit.caches):
        raise LayoutError(
            f"there are references for `{len(own)}` caches, but `{len(kit.caches)}` caches here", operation=_OPERATION
        )
    return tuple(Reference.from_json(text) for text in own)


class Load:
    """One load.

    Args:
        order: What to pull.
        deadline: On the monotonic clock.
    """

    __slots__ = (
        "cancelled",
        "deadline",
        "done",
        "ended",
        "error",
        "left",
        "order",
        "posted",
        "references",
        "refused",
        "transfers",
    )

    def __init__(self, order: PullOrder, deadline: float) -> None:
        self.order, self.deadline = order, deadline
        self.references: tuple[Reference, ...] = ()
        self.transfers: dict[int, tuple[int, Transfer]] = {}  # by id: cache and transfer
        self.left = 0  # transfers that have not ended or are not quiet
        self.done = set[int]()  # caches whose blocks are there, or not needed
        self.error: PdkvError | None = None
        self.posted = self.refused = self.cancelled = self.ended = False

    @property
    def request_id(self) -> str:
        """The request that waits."""
        return self.order.request_id

    @property
    def incarnation(self) -> str:
        """The life of the producer's engine that it needs."""
        return self.references[0].incarnation

    def read(self, kit: Kit) -> None:
        """Reads and checks the references.

        Raises:
            PdkvError: They can't be for this rank, as far as it can tell.
        """
        order = self.order
        self.references = own_references(order.references, kit)
        if not len(order.into) == len(order.first_blocks) == kit.num_groups:
            raise LayoutError(
                f"there are blocks for `{len(order.into)}` groups, but `{kit.num_groups}` groups here",
                operation=_OPERATION,
            )

    def may_post(self, peer: Peer) -> bool:
        """Whether posting waits for nobody: the producer has told of its caches.

        Raises:
            PdkvError: The connection is gone.
        """
        return all(peer.await_cache(reference) for reference in self.references if reference.num_blocks)

    def await_caches(self, peer: Peer, timeout_s: float) -> None:
        """Waits until posting does not.

        Raises:
            PdkvError: The producer has no such cache, or does not say so in time.
        """
        for reference in self.references:
            if reference.num_blocks:
                peer.await_cache(reference, timeout_s=timeout_s)

    def post(self, peer: Peer, kit: Kit) -> list[Reference]:
        """Posts the transfers; gives the references that it has no use for. Raises with some posted, perhaps.

        Raises:
            PdkvError: One can't be.
        """
        self.posted, order = True, self.order
        # The blocks may be somebody's whose last step the device has not done yet: nothing is written before that.
        after: dict[str, Any] = {} if kit.device is None else {"stream": kit.device.stream}
        unused = []
        for at, (cache, group, reference) in enumerate(zip(kit.caches, kit.groups, self.references, strict=True)):
            if reference.fingerprint != cache.fingerprint:
                # The directory's caches were the same as these, so this reference is none of its ranks'.
                raise ReferenceFingerprintError(
                    f"the reference of group `{group}` is for caches of another meaning",
                    operation=_OPERATION,
                    context={"fingerprint": f"{cache.fingerprint} here, {reference.fingerprint} there"},
                )
            if not order.into[group]:
                self.done.add(at)
                if reference.num_blocks:
                    unused.append(reference)
                continue
            transfer = cache.pull(
                reference,
                order.into[group],
                first_block=order.first_blocks[group],
                digest=order.digest,
                timeout_s=self.time_left(),
                require=kit.settings.require,
                peer=peer,
                **after,
            )
            self.transfers[transfer.id] = (at, transfer)
            self.left += 1
        return unused

    def cancel(self) -> None:
        """Asks all transfers to end."""
        for _, transfer in self.transfers.values():
            transfer.cancel()

    def time_left(self) -> float:
        """Seconds until the deadline.

        Raises:
            TransferTimeoutError: It has passed.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TransferTimeoutError("the load has not begun in time", operation=_OPERATION)
        return left
