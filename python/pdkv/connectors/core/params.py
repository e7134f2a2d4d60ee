"""What travels in a request's `kv_transfer_params`: NIXL's keys for routers, and `pdkv` for the consumer.

NIXL's pull schema stands at the top, since routers copy it and some look into it. What pdkv goes by is the object
`pdkv`. This module writes them; `reading` reads what comes back from a client.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdkv.connectors.core.digest import seal, signature
from pdkv.connectors.core.work import References

__all__ = [
    "SPLIT_VERSION",
    "VERSION",
    "Group",
    "Ticket",
    "answer",
    "asks_for_decode",
    "asks_for_prefill",
    "expand",
    "runs_of",
]

# With the first a rank has one reference for each KV group. With the other it has one for each of its caches, of which
# a group has several where its layers differ in shape or type; an earlier release refuses it by its number.
VERSION = 1
SPLIT_VERSION = 2
_REMOTE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Group:
    """What is exported of one KV group.

    Attributes:
        first: Position in the prompt's blocks of the first block that is exported.
        block_tokens: Tokens in a block.
        runs: Block ids at the producer, as `(first id, how many)`.
    """

    first: int
    block_tokens: int
    runs: Runs

    @property
    def num_blocks(self) -> int:
        """Blocks that are exported."""
        return sum(count for _, count in self.runs)


@dataclass(frozen=True)
class Ticket:
    """What a producer says of an export.

    Attributes:
        engine_id: The producer's LLM engine.
        request_id: The request at the producer.
        num_tokens: Tokens of the prompt that the export covers.
        groups: For each KV group, what is exported of it.
        references: For each rank and cache.
        tp_size: Ranks of the producer that share the heads.
        pp_size: Ranks of the producer that share the layers.
        version: How the references are sorted.
    """

    engine_id: str
    request_id: str
    num_tokens: int
    groups: tuple[Group, ...]
    references: References = ()
    tp_size: int = 1
    pp_size: int = 1
    version: int = VERSION

    def statement(self) -> dict[str, Any]:
        """The object `pdkv`, but for the references."""
        return {
            "version": self.version,
            "engine_id": self.engine_id,
            "request_id": self.request_id,
            "num_tokens": self.num_tokens,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "groups": [
                {"first": group.first, "block_tokens": group.block_tokens, "runs": [list(run) for run in group.runs]}
                for group in self.groups
            ],
        }

    def seal(self) -> bytes:
        """Digest of the statement."""
        return seal(self.statement())


def runs_of(block_ids: Iterable[int]) -> Runs:
    """Run-length codes block ids."""
    runs: list[list[int]] = []
    for block in block_ids:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return tuple((first, count) for first, count in runs)


def expand(runs: Runs) -> list[int]:
    """Block ids of runs."""
    return [block for first, count in runs for block in range(first, first + count)]


def asks_for_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether the request is to be prefilled here and decoded elsewhere."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def asks_for_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether the request was prefilled elsewhere and says where."""
    if not isinstance(params, Mapping) or not params.get("do_remote_prefill"):
        return False
    return params.get("pdkv") is not None or any(params.get(key) is not None for key in _REMOTE)


def answer(ticket: Ticket, host: str, port: int, key: bytes | None = None) -> dict[str, Any]:
    """The parameters that a producer returns: NIXL's thirteen keys but the scheduler's own, and `pdkv`.

    Args:
        ticket: What is exported.
        host: Host of the directory.
        port: Port of the directory.
        key: Signs them for consumers that share it; `None` leaves them unsigned.
    """
    blob = ticket.statement()
    blob["references"] = [[json.loads(text) for text in rank] for rank in ticket.references]
    if key is not None:
        blob["signature"] = signature(blob, host, port, key)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [expand(group.runs) for group in ticket.groups],
        "remote_engine_id": ticket.engine_id,
        "remote_request_id": ticket.request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": ticket.tp_size,
        "dcp_size": 1,
        "pp_size": ticket.pp_size,
        "remote_num_tokens": ticket.num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "pdkv": blob,
    }
