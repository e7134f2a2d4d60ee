"""Blocks of every group between two ends with the memory of a row of `backends`: the orders, and what comes of them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from connectors.backends import BLOCKS, Row
from connectors.sides import DIGEST
from connectors.stand_in import Tensor
from pdkv._core import Issuer
from pdkv.connectors.core.directory import Directory
from pdkv.connectors.core.producer import RankMint
from pdkv.connectors.core.work import ExportOrder, ProducerAddress, PullOrder, RankInfo, Work

# Blocks at both ends, by group and out of order. Groups lie on the same memory, so none has a block of the other's.
FROM = ((5, 2, 7), (6, 3))
INTO = ((1, 6, 3), (2, 5))
RANKS = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}


def offer(
    info: RankInfo, groups: int, stack: ExitStack, request_id: str = "p-1", step: int = 0
) -> tuple[ProducerAddress, Any, Work]:
    """What a producer is to do so that blocks of every group can be had; and where, and by which references."""
    directory = Directory("p", [info])
    stack.callback(directory.close)
    mint = RankMint(tuple(map(Issuer.from_bytes, info.issuers)), info.cache_groups)
    blocks = FROM[:groups]
    own = tuple(
        issuer.issue(num_blocks=len(blocks[group]), num_tokens=1, digest=DIGEST).to_json()
        for group, issuer in mint.pairs()
    )
    work = Work(exports=(ExportOrder(request_id, (own,), blocks, 60.0, step),))
    return ProducerAddress("p", "127.0.0.1", directory.port), (own,), work


def order(groups: int, producer: ProducerAddress, references: Any, request_id: str = "d-1") -> Work:
    """What a consumer is to do to have them."""
    into = INTO[:groups]
    return Work(pulls=(PullOrder(request_id, producer, references, DIGEST, into, (0,) * len(into), 1),))


def expected(p: Any, d: Any) -> np.ndarray[Any, Any]:
    """The consumer's memory as it is to be: every element of the blocks, and nothing else."""
    before = d.memory.copy()
    for group, source, target in zip(d.config.kv_cache_groups, FROM, INTO, strict=False):
        for name in group.layer_names:
            theirs, mine = by_block(p.tensors[name]), by_block(d.tensors[name])
            for here, there in zip(target, source, strict=True):
                mine[here][...] = theirs[there]
    after = d.memory.copy()
    d.memory[:] = before
    return after


def by_block(tensor: Tensor) -> Any:
    """The blocks of the scheduler's, one after another, each with its kernel blocks."""
    ratio = tensor.shape[0] // BLOCKS
    return [tensor[block * ratio : (block + 1) * ratio] for block in range(BLOCKS)]


def pairs(row: Row) -> list[tuple[str, str]]:
    """Each layout to itself's next, so that each is read and written; and the first to itself.

    Where blocks are packed that may mean to no other at all, so then also each to the others of its order.
    """
    layouts = row.layouts
    found = [(layouts[0], layouts[0]), *zip(layouts, (*layouts[1:], layouts[0]), strict=True)]
    if row.packed:
        others = ((here, there) for here in layouts for there in layouts if here != there)
        found += [(here, there) for here, there in others if one_order(row, here, there)]
    return list(dict.fromkeys(found))


def one_order(row: Row, here: str, there: str) -> bool:
    """Whether a block's heads and tokens lie in the same order at both ends, as packed blocks must."""
    inner = ("".join(axis for axis in layout if axis in "HN") for layout in (here, there))
    return len(set(inner)) == 1 or all(kind.heads == 1 for kinds in row.groups for kind in kinds)
