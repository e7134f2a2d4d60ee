"""The consumer's decisions: what a request is matched with, which blocks are fetched, when the producer is let go.

Pure bookkeeping on the scheduler side. A request goes through `arrived`, `match` (any number of times, without effect),
`allocated` and `finished`, and can be finished at any point. Each export that a request brought is answered at most
once, by a pull or a decline; one that belongs to another prompt is left to its own consumer, or to its lease.
Parameters that can't be believed become a refusal, which the workers report as a failed load, so that the LLM engine's
own policy decides what becomes of the request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pdkv.connectors.core import params as schema
from pdkv.connectors.core.params import Ticket
from pdkv.connectors.core.producer import NULL_BLOCK, parent_of
from pdkv.connectors.core.reading import Reader
from pdkv.connectors.core.work import Decline, ProducerAddress, PullOrder, References, Refusal, Watch, Work
from pdkv.errors import InternalError, LayoutError, PdkvError, ReferenceDigestError

__all__ = ["Consumer"]

_OPERATION = "match"
_Exports = tuple[ProducerAddress, References]


class _Phase(Enum):
    WAITING = 1  # nothing is ordered yet
    LOADING = 2  # a pull or a refusal is with the workers
    OVER = 3


class _Family:
    """Children of one request (`n` > 1) that brought the same export: the first of them fetches for all."""

    __slots__ = ("answered", "fetching", "members")

    def __init__(self) -> None:
        self.members = OrderedDict[str, None]()
        self.answered = False  # the export was pulled or declined
        self.fetching = False  # the pull is under way

    @property
    def first(self) -> str:
        return next(iter(self.members))


@dataclass
class _Load:
    """What one request brought.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        ticket: What the producer said, if it can be believed so far.
        exports: What is to be answered.
        refusal: Why it can't be believed.
        family: Its siblings, if it has any.
        computed: Tokens that it had when it was matched last.
        phase: How far it is.
    """

    num_prompt_tokens: int
    ticket: Ticket | None = None
    exports: _Exports | None = None
    refusal: PdkvError | None = None
    family: _Family | None = field(default=None, repr=False)
    computed: int = 0
    phase: _Phase = _Phase.WAITING


class Consumer:
    """Loads of one LLM engine.

    Args:
        engine_id: The LLM engine.
        reader: Reads what clients send.
        block_tokens: For each KV group, tokens in a block.
        lease_s: Seconds to ask for when a lease is renewed.
        on_refused: Called with each refusal, for the log.
    """

    def __init__(
        self,
        engine_id: str,
        reader: Reader,
        block_tokens: Sequence[int],
        lease_s: float,
        on_refused: Callable[[str, PdkvError], None],
    ) -> None:
        self._engine_id = engine_id
        self._reader = reader
        self._block_tokens = tuple(block_tokens)
        self._lease_s = lease_s
        self._on_refused = on_refused
        self._loads: dict[str, _Load] = {}
        self._families: dict[tuple[str, str], _Family] = {}  # by parent and export
        self._reset()

    @property
    def alive(self) -> int:
        """Requests that brought parameters and have not finished."""
        return len(self._loads)

    def arrived(self, request_id: str, params: Mapping[str, Any] | None, num_prompt_tokens: int) -> None:
        """A request came in; its lease is kept alive from here on."""
        if params is None or not schema.asks_for_prefill(params):
            return
        load = _Load(num_prompt_tokens)
        try:
            ticket, producer = self._reader.read(params, num_prompt_tokens)
        except PdkvError as error:
            load.refusal, load.exports = error, self._reader.exports(params)
            self._loads[request_id] = load
            return
        load.ticket, load.exports = ticket, (producer, ticket.references)
        if producer.engine_id == self._engine_id:
            # A router took this engine for both legs: what it has, it finds in its own prefix cache.
            self._decline(load)
            return
        self._loads[request_id] = load
        self._join_family(request_id, load)
        if load.family is None or load.family.first == request_id:
            self._watch(request_id, load)

    def turned_down(self, params: Mapping[str, Any] | None) -> None:
        """A request came in that can't be matched with anything: its producer is let go."""
        if params is not None and schema.asks_for_prefill(params):
            self._decline(_Load(0, exports=self._reader.exports(params)))

    def match(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `num_computed_tokens` can be fetched.

        Returns:
            The number, and whether it is fetched in the background; `(None, False)` to ask again in a later step.
        """
        load = self._loads.get(request_id)
        if load is None or load.phase is not _Phase.WAITING:
            return 0, False
        family = load.family
        if family is not None and family.answered:
            # Siblings have the same prompt: what was fetched is in the prefix cache by now, if there is one.
            return (None, False) if family.fetching else (0, False)
        if family is not None and family.first != request_id:
            return None, False
        load.computed = num_computed_tokens
        external = (load.num_prompt_tokens if load.ticket is None else load.ticket.num_tokens) - num_computed_tokens
        return (external, True) if external > 0 else (0, False)

    def allocated(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
        digest: Callable[[int], bytes],
    ) -> None:
        """The LLM engine has blocks for the request.

        Args:
            request_id: The request.
            block_ids: For each KV group, all its blocks, in the order of the tokens.
            num_external_tokens: Tokens that are fetched; 0 if it does without.
            digest: Gives the digest of the first so many tokens of the prompt.
        """
        load = self._loads.get(request_id)
        if load is None or load.phase is not _Phase.WAITING:
            return
        if num_external_tokens == 0:
            load.phase = _Phase.OVER
            self._let_go(request_id, load)
            return
        load.phase = _Phase.LOADING
        if load.refusal is None:
            try:
                order = self._order(request_id, load, block_ids, num_external_tokens, digest)
            except PdkvError as error:
                load.refusal = error
            except Exception as bug:  # noqa: BLE001 - the LLM engine waits for this load, so it must fail
                load.refusal = InternalError(f"the blocks can't be paired: {bug!r:.200}", operation=_OPERATION)
            else:
                self._pulls.append(order)
                if load.family is not None:
                    load.family.answered = load.family.fetching = True
                return
        self._let_go(request_id, load)
        refusal = load.refusal
        blocks = self._unfetched(load.computed, block_ids)
        self._refusals.append(Refusal(request_id, refusal.kind, refusal.message, blocks))
        self._on_refused(request_id, refusal)

    def loaded(self, request_ids: Iterable[str]) -> None:
        """The loads of these requests have ended at every rank, well or not."""
        for request_id in request_ids:
            load = self._loads.get(request_id)
            if load is not None:
                load.phase = _Phase.OVER
                if load.family is not None:
                    load.family.fetching = False

    def finished(self, request_id: str) -> None:
        """The request is over, for whatever reason. A load that is under way is still reported when it has ended."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        if load.phase is _Phase.LOADING:
            self._cancels.append(request_id)
        heir = self._leave_family(request_id, load)
        if load.phase is _Phase.WAITING:
            if heir is None:
                self._let_go(request_id, load, even_another_prompts=True)
            elif load.exports is not None:
                self._unwatches.append(request_id)
                self._watch(heir, load)

    @property
    def pending(self) -> bool:
        """Whether there is something for the workers to do."""
        return bool(
            self._pulls or self._refusals or self._declines or self._watches or self._unwatches or self._cancels
        )

    def take(self) -> Work:
        """What the workers are to do by the next step."""
        if not self.pending:
            return Work.NOTHING
        work = Work(
            pulls=tuple(self._pulls),
            refusals=tuple(self._refusals),
            declines=tuple(self._declines),
            watches=tuple(self._watches),
            unwatches=tuple(self._unwatches),
            cancels=tuple(self._cancels),
        )
        self._reset()
        return work

    def _reset(self) -> None:
        self._pulls: list[PullOrder] = []
        self._refusals: list[Refusal] = []
        self._declines: list[Decline] = []
        self._watches: list[Watch] = []
        self._unwatches: list[str] = []
        self._cancels: list[str] = []

    def _join_family(self, request_id: str, load: _Load) -> None:
        name = _family_name(request_id, load)
        if name is not None:
            load.family = self._families.setdefault(name, _Family())
            load.family.members[request_id] = None

    def _leave_family(self, request_id: str, load: _Load) -> str | None:
        """Takes a request out of its family; gives who is to fetch now, if that was up to this one."""
        family = load.family
        if family is None:
            return None
        was_first = family.first == request_id
        del family.members[request_id]
        if load.phase is _Phase.LOADING:
            family.fetching = False
        if not family.members:
            name = _family_name(request_id, load)
            if name is not None:
                del self._families[name]
            return None
        return family.first if was_first and not family.answered else None

    def _watch(self, request_id: str, load: _Load) -> None:
        if load.exports is not None:
            self._watches.append(Watch(request_id, *load.exports, self._lease_s))

    def _decline(self, load: _Load) -> None:
        if load.exports is not None:
            self._declines.append(Decline(*load.exports))

    def _let_go(self, request_id: str, load: _Load, *, even_another_prompts: bool = False) -> None:
        """Answers the export of a request that will not fetch, unless a sibling does."""
        family = load.family
        if family is not None:
            if family.answered or (family.members and family.first != request_id):
                return
            family.answered = True
        if load.ticket is not None:
            self._unwatches.append(request_id)
        if even_another_prompts or not isinstance(load.refusal, ReferenceDigestError):
            self._decline(load)

    def _unfetched(self, computed: int, block_ids: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The blocks behind what the request had already: those that a load was to fill, at least."""
        return tuple(
            block
            for ids, block_tokens in zip(block_ids, self._block_tokens, strict=False)
            for block in ids[computed // block_tokens :]
            if block != NULL_BLOCK
        )

    def _order(
        self,
        request_id: str,
        load: _Load,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
        digest: Callable[[int], bytes],
    ) -> PullOrder:
        """Pairs the blocks of both ends by their position in the prompt."""
        ticket = load.ticket
        if ticket is None or load.exports is None or len(block_ids) != len(ticket.groups):
            raise LayoutError(f"blocks of `{len(block_ids)}` KV groups were allocated", operation=_OPERATION)
        wanted_tokens = load.computed + num_external_tokens
        if wanted_tokens > ticket.num_tokens:
            raise LayoutError(
                f"tokens up to `{wanted_tokens}` are wanted, the export has `{ticket.num_tokens}`",
                operation=_OPERATION,
            )
        into, first_blocks = [], []
        for at, (group, ids) in enumerate(zip(ticket.groups, block_ids, strict=True)):
            start = load.computed // group.block_tokens
            end = -(-wanted_tokens // group.block_tokens)
            while start < end and start < len(ids) and ids[start] == NULL_BLOCK:
                start += 1
            wanted = tuple(ids[start:end])
            if start < end and (len(wanted) < end - start or NULL_BLOCK in wanted or start < group.first):
                raise LayoutError(
                    f"blocks `{start}..{end}` of group `{at}` are needed, the producer exported them from "
                    f"`{group.first}` on and this engine allocated `{len(ids)}`",
                    operation=_OPERATION,
                )
            into.append(wanted)
            first_blocks.append(max(start - group.first, 0))
        producer, references = load.exports
        return PullOrder(
            request_id=request_id,
            producer=producer,
            references=references,
            digest=digest(ticket.num_tokens) + ticket.seal(),
            into=tuple(into),
            first_blocks=tuple(first_blocks),
            num_tokens=num_external_tokens,
        )


def _family_name(request_id: str, load: _Load) -> tuple[str, str] | None:
    """What children of one request that brought the same export have in common."""
    parent = parent_of(request_id)
    return None if parent is None or load.ticket is None else (parent, load.ticket.references[0][0])
