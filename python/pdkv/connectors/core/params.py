"""What travels in a request's `kv_transfer_params`: NIXL's keys for routers, and `pdkv` for the consumer.

NIXL's pull schema stands at the top, since routers copy it and some look into it. What pdkv goes by is the object
`pdkv`; a key at the top that says something else than it does is refused. Everything here comes from a client and may
be forged: types and sizes are checked, nothing is believed. What holds the truth is the owner, which compares the
digest and the seals.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdkv.connectors.core.digest import seal
from pdkv.connectors.core.work import ProducerAddress, References
from pdkv.errors import PdkvError, ReferenceDigestError, ReferenceForgedError, UnsupportedError

__all__ = [
    "Group",
    "Ticket",
    "answer",
    "asks_for_decode",
    "asks_for_prefill",
    "expand",
    "read",
    "read_exports",
    "runs_of",
]

VERSION = 1
_OPERATION = "kv_transfer_params"
_MAX_RANKS = 4096
_MAX_GROUPS = 256
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
        references: For each rank and group.
        tp_size: Ranks of the producer that share the heads.
        pp_size: Ranks of the producer that share the layers.
    """

    engine_id: str
    request_id: str
    num_tokens: int
    groups: tuple[Group, ...]
    references: References = ()
    tp_size: int = 1
    pp_size: int = 1

    def statement(self) -> dict[str, Any]:
        """The object `pdkv`, but for the references."""
        return {
            "version": VERSION,
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


def answer(ticket: Ticket, host: str, port: int) -> dict[str, Any]:
    """The parameters that a producer returns: NIXL's thirteen keys but the scheduler's own, and `pdkv`."""
    blob = ticket.statement()
    blob["references"] = [[json.loads(text) for text in rank] for rank in ticket.references]
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


def read(params: Mapping[str, Any], num_prompt_tokens: int) -> tuple[Ticket, ProducerAddress]:
    """Reads what a producer returned, from whoever passes it on.

    Args:
        params: The request's parameters.
        num_prompt_tokens: Tokens of the prompt that came with them, which bounds all that they can say.

    Raises:
        ReferenceDigestError: The prompt is shorter than what was exported, so it is another.
        UnsupportedError: It is no producer of pdkv's, or of a later release.
        ReferenceForgedError: A field holds what no producer would write, or two of them disagree.
    """
    blob = params.get("pdkv")
    if blob is None:
        raise UnsupportedError(
            f"the parameters name engine `{params.get('remote_engine_id')}` but hold no `pdkv`",
            operation=_OPERATION,
            hint="the producer must run pdkv's connector, and the router must pass its answer on unchanged",
        )
    try:
        ticket = _ticket(blob, num_prompt_tokens)
        producer = _producer(params, blob)
        _compare(params, ticket)
    except PdkvError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _forged(f"`pdkv` can't be read: {error!r:.200}") from error
    return ticket, producer


def read_exports(params: Mapping[str, Any]) -> tuple[ProducerAddress, References] | None:
    """The exports that parameters name, however little else in them can be believed; `None` if they name none.

    Enough to give them back to their producer, which compares the seals.
    """
    try:
        blob = params["pdkv"]
        return _producer(params, blob), _references(blob)
    except (PdkvError, LookupError, TypeError, ValueError, RecursionError):
        return None


def _producer(params: Mapping[str, Any], blob: Any) -> ProducerAddress:
    return ProducerAddress(
        _text(blob["engine_id"], "engine_id"),
        _text(params.get("remote_host"), "remote_host"),
        _port(params.get("remote_port")),
    )


def _references(blob: Any) -> References:
    return tuple(
        tuple(json.dumps(reference) for reference in _items(rank, "references", _MAX_GROUPS))
        for rank in _items(blob["references"], "references", _MAX_RANKS)
    )


def _ticket(blob: Any, num_prompt_tokens: int) -> Ticket:
    version = blob["version"]
    if version != VERSION:
        raise UnsupportedError(
            f"`pdkv` has format `{version!r:.20}`, this release reads `{VERSION}`",
            operation=_OPERATION,
            hint="use the same release of pdkv on both sides",
        )
    num_tokens = _number(blob["num_tokens"], "num_tokens", 1)
    if num_tokens > num_prompt_tokens:
        raise ReferenceDigestError(
            f"the export is of `{num_tokens}` tokens, the prompt has `{num_prompt_tokens}`",
            operation=_OPERATION,
            hint="the reference is of another prompt",
        )
    groups = tuple(_group(group, num_tokens) for group in _items(blob["groups"], "groups", _MAX_GROUPS))
    references = _references(blob)
    if not references or any(len(rank) != len(groups) for rank in references):
        raise _forged(f"there are references for `{[len(rank) for rank in references]}` of `{len(groups)}` groups")
    return Ticket(
        engine_id=_text(blob["engine_id"], "engine_id"),
        request_id=_text(blob["request_id"], "request_id"),
        num_tokens=num_tokens,
        groups=groups,
        references=references,
        tp_size=_number(blob["tp_size"], "tp_size", 1),
        pp_size=_number(blob["pp_size"], "pp_size", 1),
    )


def _group(value: Any, num_tokens: int) -> Group:
    first = _number(value["first"], "first")
    block_tokens = _number(value["block_tokens"], "block_tokens", 1)
    blocks = -(-num_tokens // block_tokens)
    runs = tuple((_number(run[0], "runs"), _number(run[1], "runs", 1)) for run in _items(value["runs"], "runs", blocks))
    group = Group(first, block_tokens, runs)
    if first + group.num_blocks != blocks:
        raise _forged(f"`{group.num_blocks}` blocks from block `{first}` on are said to end at block `{blocks}`")
    return group


def _compare(params: Mapping[str, Any], ticket: Ticket) -> None:
    """Refuses what stands at the top when it disagrees with the object `pdkv`."""
    facts: dict[str, Any] = {
        "remote_engine_id": ticket.engine_id,
        "remote_request_id": ticket.request_id,
        "remote_num_tokens": ticket.num_tokens,
        "tp_size": ticket.tp_size,
        "dcp_size": 1,
        "pp_size": ticket.pp_size,
        "transfer_mode": "pull",
    }
    for key, fact in facts.items():
        value = params.get(key)
        if value is not None and value != fact:
            raise _forged(f"`{key}` is `{value!r:.80}`, the producer's answer said `{fact!r:.80}`")
    blocks = params.get("remote_block_ids")
    if blocks is not None and blocks != [expand(group.runs) for group in ticket.groups]:
        raise _forged(f"`remote_block_ids` are `{blocks!r:.80}`, the producer's answer said others")


def _items(value: Any, name: str, most: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise _forged(f"`{name}` is no list of at most `{most}` items")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 1024:
        raise _forged(f"`{name}` is `{value!r:.80}`, no text")
    return value


def _number(value: Any, name: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 32:
        raise _forged(f"`{name}` is `{value!r:.80}`, no number from `{least}` up")
    return value


def _port(value: Any) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)  # some routers carry it as text
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
        raise _forged(f"`remote_port` is `{value!r:.80}`, no port")
    return value


def _forged(text: str) -> ReferenceForgedError:
    return ReferenceForgedError(
        text, operation=_OPERATION, hint="pass the producer's `kv_transfer_params` on as they are, to the same prompt"
    )
