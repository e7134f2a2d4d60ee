"""Reads `kv_transfer_params` as a client sends them: everything in them may be forged.

Types, sizes and counts are compared with what this engine itself is before anything is built from them, so that
reading costs no more than the prompt that came with them. Nothing is believed: what holds the truth is the owner, which
compares the digest and the seals; with a shared key it is also known that a producer wrote them.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdkv.connectors.core.digest import signature
from pdkv.connectors.core.params import SPLIT_VERSION, VERSION, Group, Ticket, expand
from pdkv.connectors.core.shown import shown
from pdkv.connectors.core.work import ProducerAddress, References
from pdkv.errors import LayoutError, PdkvError, ReferenceDigestError, ReferenceForgedError, UnsupportedError

__all__ = ["Reader", "exports_of"]

_OPERATION = "kv_transfer_params"
_MAX_TEXT = 1024
_MAX_FIELDS = 32  # of a reference
_MAX_REFERENCES = 4096


class Reader:
    """Reads for one LLM engine.

    Args:
        block_tokens: For each of its KV groups, tokens in a block.
        tp_size: Its ranks that share the heads.
        pp_size: Its ranks that share the layers.
        key: What producers sign with; `None` takes unsigned parameters.
    """

    def __init__(self, block_tokens: Sequence[int], *, tp_size: int, pp_size: int, key: bytes | None = None) -> None:
        self._block_tokens = tuple(block_tokens)
        self._sizes = {"tp_size": tp_size, "pp_size": pp_size}
        self._key = key
        self._version = VERSION
        self._caches = (len(self._block_tokens),) * (tp_size * pp_size)

    def expect(self, caches: Sequence[int]) -> None:
        """Says how many caches each rank has, where that is not one for each group. Producers must have as many."""
        self._version, self._caches = SPLIT_VERSION, tuple(caches)

    def read(self, params: Mapping[str, Any], num_prompt_tokens: int) -> tuple[Ticket, ProducerAddress]:
        """Reads what a producer returned, from whoever passes it on.

        Args:
            params: The request's parameters.
            num_prompt_tokens: Tokens of the prompt that came with them.

        Raises:
            ReferenceDigestError: The prompt is shorter than what was exported, so it is another.
            LayoutError: The producer has other sizes; names both.
            UnsupportedError: It is no producer of pdkv's, or of a later release.
            ReferenceForgedError: A field holds what no producer would write, two of them disagree, or the signature is
                not of the shared key.
        """
        blob = params.get("pdkv")
        if blob is None:
            raise UnsupportedError(
                f"the parameters name engine `{shown(params.get('remote_engine_id'))}` but hold no `pdkv`",
                operation=_OPERATION,
                hint="the producer must run pdkv's connector, and the router must pass its answer on unchanged",
            )
        try:
            ticket, producer = self._ticket(blob, num_prompt_tokens), _producer(params, blob)
            _compare(params, ticket)
            self._check_signature(blob, producer)
        except PdkvError:
            raise
        except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _forged(f"`pdkv` can't be read: {shown(str(error))}") from error
        return ticket, producer

    def exports(self, params: Mapping[str, Any]) -> tuple[ProducerAddress, References] | None:
        """The exports that parameters name, however little else in them can be believed; `None` if they name none.

        Enough to give them back to their producer, which compares the seals.
        """
        try:
            blob = params["pdkv"]
            producer, references = _producer(params, blob), self._references(blob)
            self._check_signature(blob, producer)
        except (PdkvError, LookupError, TypeError, ValueError, OverflowError, RecursionError):
            return None
        return producer, references

    def _ticket(self, blob: Any, num_prompt_tokens: int) -> Ticket:
        version = blob["version"]
        if type(version) is not int or version not in (VERSION, SPLIT_VERSION):
            raise UnsupportedError(
                f"`pdkv` has format `{shown(version)}`, this release reads `{VERSION}` and `{SPLIT_VERSION}`",
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
        for name, size in self._sizes.items():
            if (theirs := _number(blob[name], name, 1)) != size:
                raise _unequal(f"`{name}` is `{size}` here and `{theirs}` there")
        groups = _list(blob["groups"], "groups")
        if len(groups) != len(self._block_tokens):
            raise _unequal(f"the producer has `{len(groups)}` KV groups, this engine `{len(self._block_tokens)}`")
        if version != self._version:
            kinds = {VERSION: "alike", SPLIT_VERSION: "of several shapes or types"}
            raise _unequal(f"the layers of a KV group are {kinds[self._version]} here and {kinds[version]} there")
        return Ticket(
            engine_id=_text(blob["engine_id"], "engine_id"),
            request_id=_text(blob["request_id"], "request_id"),
            num_tokens=num_tokens,
            groups=tuple(
                _group(group, num_tokens, tokens) for group, tokens in zip(groups, self._block_tokens, strict=True)
            ),
            references=self._references(blob),
            version=self._version,
            **self._sizes,
        )

    def _references(self, blob: Any) -> References:
        ranks = [_list(rank, "references") for rank in _list(blob["references"], "references")]
        counts = tuple(map(len, ranks))
        if counts != self._caches:
            if len(counts) == len(self._caches) and blob["version"] == SPLIT_VERSION:
                raise _unequal(f"the ranks have `{list(self._caches)}` caches here and `{list(counts)}` there")
            raise _forged(f"there are not references for `{list(self._caches)}` caches of the ranks")
        return tuple(tuple(_reference(value) for value in rank) for rank in ranks)

    def _check_signature(self, blob: Any, producer: ProducerAddress) -> None:
        if self._key is None:
            return
        given = blob.get("signature")
        expected = signature(blob, producer.host, producer.port, self._key)
        if not (isinstance(given, str) and given.isascii() and hmac.compare_digest(given, expected)):
            raise _forged("they are not signed with the secret of this engine")


def exports_of(params: Mapping[str, Any]) -> tuple[ProducerAddress, References] | None:
    """The exports that parameters name, for somebody without ranks and groups of his own; `None` if they name none."""
    try:
        blob = params["pdkv"]
        ranks = [_list(rank, "references") for rank in _list(blob["references"], "references")]
        if sum(map(len, ranks)) > _MAX_REFERENCES:
            return None
        return _producer(params, blob), tuple(tuple(map(_reference, rank)) for rank in ranks)
    except (PdkvError, LookupError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def _producer(params: Mapping[str, Any], blob: Any) -> ProducerAddress:
    return ProducerAddress(
        _text(blob["engine_id"], "engine_id"),
        _text(params.get("remote_host"), "remote_host"),
        _port(params.get("remote_port")),
    )


def _group(value: Any, num_tokens: int, block_tokens: int) -> Group:
    theirs = _number(value["block_tokens"], "block_tokens", 1)
    if theirs != block_tokens:
        raise _unequal(f"the producer's blocks hold `{theirs}` tokens, this engine's `{block_tokens}`")
    first = _number(value["first"], "first")
    blocks = -(-num_tokens // block_tokens)
    given = _list(value["runs"], "runs")
    if len(given) > blocks:
        raise _forged(f"there are `{len(given)}` runs of `{blocks}` blocks")
    runs = tuple((_number(run[0], "runs"), _number(run[1], "runs", 1)) for run in given)
    group = Group(first, block_tokens, runs)
    if first + group.num_blocks != blocks:
        raise _forged(f"`{group.num_blocks}` blocks from block `{first}` on are said to end at block `{blocks}`")
    return group


def _reference(value: Any) -> str:
    """The JSON text of a reference: a flat object of short values."""
    if not isinstance(value, dict) or len(value) > _MAX_FIELDS:
        raise _forged("a reference is no object of a few fields")
    for name, field in value.items():
        if not _is_short(name) or not ((isinstance(field, str) and len(field) <= _MAX_TEXT) or _is_number(field)):
            raise _forged(f"a reference has a field `{shown(name[:_MAX_TEXT])}` that none has")
    return json.dumps(value)


def _compare(params: Mapping[str, Any], ticket: Ticket) -> None:
    """Refuses what stands at the top when it disagrees with the object `pdkv`."""
    facts: dict[str, str | int] = {
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
        if value is not None and (type(value) is not type(fact) or value != fact):
            raise _forged(f"`{key}` is {_quoted(value)}, the producer's answer said `{shown(fact)}`")
    blocks = params.get("remote_block_ids")
    if blocks is None:
        return
    counts = [group.num_blocks for group in ticket.groups]
    if not isinstance(blocks, list) or [len(ids) if isinstance(ids, list) else -1 for ids in blocks] != counts:
        raise _forged(f"`remote_block_ids` are not lists of `{counts}` blocks, as the producer's answer said")
    if blocks != [expand(group.runs) for group in ticket.groups]:
        raise _forged("`remote_block_ids` are others than the producer's answer said")


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _forged(f"`{name}` is {_quoted(value)}, no list")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT:
        raise _forged(f"`{name}` is {_quoted(value)}, no text of up to `{_MAX_TEXT}` characters")
    return value


def _number(value: Any, name: str, least: int = 0) -> int:
    if not _is_number(value) or not least <= value < 1 << 32:
        raise _forged(f"`{name}` is {_quoted(value)}, no number from `{least}` up")
    return int(value)


def _port(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 5:
        value = int(value)  # some routers carry it as text
    if not _is_number(value) or not 0 < value < 65536:
        raise _forged(f"`remote_port` is {_quoted(value)}, no port")
    return int(value)


def _is_number(value: Any) -> bool:
    # A whole number that fits what any field holds: one of a million digits would take long to show.
    return type(value) is int and -(1 << 64) < value < 1 << 64


def _is_short(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= _MAX_TEXT


def _quoted(value: Any) -> str:
    """A value fit for a message, or its type where showing it would cost what it is large."""
    if isinstance(value, str):
        return f"`{shown(value[:_MAX_TEXT])}`"
    return (
        f"`{value}`"
        if value is None or isinstance(value, bool | float) or _is_number(value)
        else f"a {type(value).__name__}"
    )


def _unequal(text: str) -> LayoutError:
    return LayoutError(
        text,
        operation=_OPERATION,
        hint="start both engines with the same model, `--block-size` and parallel sizes",
    )


def _forged(text: str) -> ReferenceForgedError:
    return ReferenceForgedError(
        text, operation=_OPERATION, hint="pass the producer's `kv_transfer_params` on as they are, to the same prompt"
    )
