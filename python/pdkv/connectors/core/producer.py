"""The producer's decisions: which finished requests are exported, and what their answers say.

Pure bookkeeping on the scheduler side: references are minted here, the memory is pinned by the workers, who are told by
the next step. A consumer that is faster than that waits at the owner.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pdkv.connectors.core.params import SPLIT_VERSION, VERSION, Group, Ticket, answer, runs_of
from pdkv.connectors.core.work import ExportOrder

__all__ = ["NULL_BLOCK", "Exported", "Issues", "Producer", "RankMint", "parent_of"]

# Stands in a block table where a sliding window has left a block behind.
NULL_BLOCK = 0
_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)


class Issues(Protocol):
    """What mints references: `pdkv.Issuer`."""

    def issue(self, *, num_blocks: int, num_tokens: int, digest: bytes, consumers: int) -> Any:
        """Gives a reference to an export that is yet to be made."""


@dataclass(frozen=True)
class RankMint:
    """What mints for one rank.

    Attributes:
        issuers: For each of its caches.
        groups: For each of its caches, the group that it belongs to; empty where each group has one.
    """

    issuers: Sequence[Issues]
    groups: Sequence[int] = ()

    def pairs(self) -> Iterator[tuple[int, Issues]]:
        """Each cache's group and what mints for it."""
        return zip(self.groups or range(len(self.issuers)), self.issuers, strict=True)


@dataclass(frozen=True)
class Exported:
    """A finished request's blocks.

    Attributes:
        request_id: The request.
        block_ids: For each KV group, its blocks in the order of the tokens.
        num_tokens: Tokens of the prompt whose KV they hold.
        digest: Digest of that prefix.
        step: The last step that wrote into them.
    """

    request_id: str
    block_ids: tuple[Sequence[int], ...]
    num_tokens: int
    digest: bytes
    step: int = 0


class Producer:
    """Exports of one LLM engine.

    Args:
        engine_id: The LLM engine.
        block_tokens: For each KV group, tokens in a block.
        lease_s: First lease of an export.
        key: Signs what is answered, for consumers that share it.
    """

    def __init__(self, engine_id: str, block_tokens: Sequence[int], lease_s: float, key: bytes | None = None) -> None:
        self._engine_id = engine_id
        self._block_tokens = tuple(block_tokens)
        self._lease_s = lease_s
        self._key = key
        self._orders: list[ExportOrder] = []
        self._alive: dict[str, str | None] = {}  # request -> its parent
        self._families: dict[str, tuple[bytes, dict[str, Any]]] = {}

    @property
    def alive(self) -> int:
        """Exports that have not ended."""
        return len(self._alive)

    def export(
        self,
        finished: Exported,
        ranks: Sequence[RankMint],
        host: str,
        port: int,
        *,
        tp_size: int,
        pp_size: int,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Issues the references to a finished request's blocks.

        Children of one request (`n` > 1) share the export of the first of them that finishes: any one of their answers
        may be the one that the client gets.

        Args:
            finished: The blocks.
            ranks: What mints for each rank.
            host: Host of the directory.
            port: Port of the directory.
            tp_size: Ranks that share the heads.
            pp_size: Ranks that share the layers.

        Returns:
            Whether the blocks stay pinned until every rank has reported the request as sent, and the parameters for the
            client. `(False, None)` if there is nothing to export.
        """
        parent = parent_of(finished.request_id)
        sibling = self._families.get(parent) if parent is not None else None
        if sibling is not None and sibling[0] == finished.digest:
            return False, dict(sibling[1])  # vLLM adds to what it gets
        groups = self._groups(finished)
        if groups is None or finished.request_id in self._alive:
            return False, None
        ticket = Ticket(
            self._engine_id,
            finished.request_id,
            finished.num_tokens,
            groups,
            tp_size=tp_size,
            pp_size=pp_size,
            version=SPLIT_VERSION if any(rank.groups for rank in ranks) else VERSION,
        )
        digest = finished.digest + ticket.seal()
        references = tuple(
            tuple(
                issuer.issue(
                    num_blocks=groups[group].num_blocks,
                    num_tokens=_held(groups[group], finished.num_tokens),
                    digest=digest,
                    consumers=1,
                ).to_json()
                for group, issuer in rank.pairs()
            )
            for rank in ranks
        )
        ticket = replace(ticket, references=references)
        pinned = tuple(
            tuple(blocks[group.first : group.first + group.num_blocks])
            for blocks, group in zip(finished.block_ids, groups, strict=True)
        )
        params = answer(ticket, host, port, self._key)
        self._orders.append(ExportOrder(finished.request_id, references, pinned, self._lease_s, finished.step))
        self._alive[finished.request_id] = parent
        if parent is not None:
            self._families[parent] = (finished.digest, dict(params))
        return True, params

    @property
    def pending(self) -> bool:
        """Whether there is something for the workers to pin."""
        return bool(self._orders)

    def take(self) -> tuple[ExportOrder, ...]:
        """What the workers are to pin by the next step."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def ended(self, request_ids: Iterable[str]) -> None:
        """The exports of these requests have ended at every rank."""
        for request_id in request_ids:
            parent = self._alive.pop(request_id, None)
            if parent is not None:
                self._families.pop(parent, None)

    def _groups(self, finished: Exported) -> tuple[Group, ...] | None:
        if finished.num_tokens < 1 or len(finished.block_ids) != len(self._block_tokens):
            return None
        groups = []
        for blocks, block_tokens in zip(finished.block_ids, self._block_tokens, strict=True):
            needed = -(-finished.num_tokens // block_tokens)
            held = list(blocks[:needed])
            first = next((at for at, block in enumerate(held) if block != NULL_BLOCK), len(held))
            if len(held) < needed or NULL_BLOCK in held[first:]:
                return None
            groups.append(Group(first, block_tokens, runs_of(held[first:])))
        return tuple(groups)


def parent_of(request_id: str) -> str | None:
    """The request that a child belongs to: the LLM engine calls children `0_parent`, `1_parent` and so on."""
    match = _CHILD.fullmatch(request_id)
    return match[1] if match else None


def _held(group: Group, num_tokens: int) -> int:
    """Tokens whose KV the exported blocks of a group hold."""
    return num_tokens - group.first * group.block_tokens
