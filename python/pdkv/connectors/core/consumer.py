"""The consumer's decisions: what a request is matched with, which blocks are fetched, when the producer is let go.

Pure bookkeeping on the scheduler side. A request goes through `arrived`, `match` (any number of times, without effect),
`allocated` and `finished`, and can be finished at any point. Each export that a request brought is answered exactly
once: by a pull, or by a decline. Parameters that can't be believed become a refusal, which the workers report as a
failed load, so that the LLM engine's own policy decides what becomes of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pdkv.connectors.core import params as schema
from pdkv.connectors.core.params import Ticket
from pdkv.connectors.core.producer import NULL_BLOCK, parent_of
from pdkv.connectors.core.work import Decline, ProducerAddress, PullOrder, References, Refusal, Watch, Work
from pdkv.errors import LayoutError, PdkvError

__all__ = ["Consumer"]

_OPERATION = "match"


class _Phase(Enum):
    WAITING = 1  # nothing is ordered yet
    LOADING = 2  # a pull or a refusal is with the workers
    OVER = 3


@dataclass
class _Load:
    """What one request brought.

    Attributes:
        ticket: What the producer said, if it can be believed so far.
        producer: Where it can be asked.
        references: What is to be answered, by a pull or a decline.
        refusal: Why it can't be believed.
        leader: The sibling that fetches for this request too.
        phase: How far it is.
        num_prompt_tokens: Tokens of the prompt.
    """

    ticket: Ticket | None
    producer: ProducerAddress | None
    references: References
    refusal: PdkvError | None
    leader: str | None
    num_prompt_tokens: int
    phase: _Phase = _Phase.WAITING


class Consumer:
    """Loads of one LLM engine.

    Args:
        engine_id: The LLM engine.
        block_tokens: For each KV group, tokens in a block.
        lease_s: Seconds to ask for when a lease is renewed.
        on_refused: Called with each refusal, for logs and statistics.
    """

    def __init__(
        self,
        engine_id: str,
        block_tokens: Sequence[int],
        lease_s: float,
        on_refused: Callable[[str, PdkvError], None],
    ) -> None:
        self._engine_id = engine_id
        self._block_tokens = tuple(block_tokens)
        self._lease_s = lease_s
        self._on_refused = on_refused
        self._loads: dict[str, _Load] = {}
        self._families: dict[tuple[str, str], list[str]] = {}  # parent and export -> siblings, as they came
        self._reset()

    @property
    def alive(self) -> int:
        """Requests that brought parameters and have not finished."""
        return len(self._loads)

    def arrived(self, request_id: str, params: Mapping[str, Any] | None, num_prompt_tokens: int) -> None:
        """A request came in; its lease is kept alive from here on."""
        if params is None or not schema.asks_for_prefill(params):
            return
        try:
            ticket, producer = schema.read(params, num_prompt_tokens)
        except PdkvError as error:
            named = schema.read_exports(params)
            where, references = (None, ()) if named is None else named
            self._loads[request_id] = _Load(None, where, references, error, None, num_prompt_tokens)
            return
        if producer.engine_id == self._engine_id:
            # A router took this engine for both legs: what it has, it finds in its own prefix cache.
            self._declines.append(Decline(producer, ticket.references))
            return
        leader = self._leader(request_id, ticket)
        self._loads[request_id] = _Load(ticket, producer, ticket.references, None, leader, num_prompt_tokens)
        if leader is None:
            self._watches.append(Watch(request_id, producer, ticket.references, self._lease_s))

    def match(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `num_computed_tokens` can be fetched.

        Returns:
            The number, and whether it is fetched in the background; `(None, False)` to ask again in a later step.
        """
        load = self._loads.get(request_id)
        if load is None or load.phase is not _Phase.WAITING:
            return 0, False
        if load.leader is not None and load.refusal is None:
            # Siblings have the same prompt: what the leader fetched is in the prefix cache by now, if there is one.
            leader = self._loads.get(load.leader)
            return (None, False) if leader is not None and leader.phase is not _Phase.OVER else (0, False)
        held = load.num_prompt_tokens if load.ticket is None else load.ticket.num_tokens
        external = held - num_computed_tokens
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
            self._let_go(request_id, load)
            return
        load.phase = _Phase.LOADING
        if load.refusal is None and load.ticket is not None and load.producer is not None:
            try:
                order = self._order(request_id, load.ticket, load.producer, block_ids, num_external_tokens, digest)
            except PdkvError as error:
                load.refusal = error
                self._unwatches.append(request_id)
                self._declines.append(Decline(load.producer, load.references))
            else:
                self._pulls.append(order)
                return
        if load.refusal is not None:
            blocks = self._unfetched(load.num_prompt_tokens, num_external_tokens, block_ids)
            self._refusals.append(Refusal(request_id, load.refusal.kind, load.refusal.message, blocks))
            self._on_refused(request_id, load.refusal)

    def loaded(self, request_ids: Iterable[str]) -> None:
        """The loads of these requests have ended at every rank, well or not."""
        for request_id in request_ids:
            load = self._loads.get(request_id)
            if load is not None:
                load.phase = _Phase.OVER

    def finished(self, request_id: str) -> None:
        """The request is over, for whatever reason. A load that is under way is still reported when it has ended."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        if load.phase is _Phase.WAITING:
            self._let_go(request_id, load)
        elif load.phase is _Phase.LOADING:
            self._cancels.append(request_id)
        self._leave_family(request_id, load)

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

    def _leader(self, request_id: str, ticket: Ticket) -> str | None:
        """The sibling that fetches what this request would, or `None` if it does itself."""
        family = _family(request_id, ticket)
        if family is None:
            return None
        siblings = self._families.setdefault(family, [])
        siblings.append(request_id)
        return None if siblings[0] == request_id else siblings[0]

    def _leave_family(self, request_id: str, load: _Load) -> None:
        family = None if load.ticket is None else _family(request_id, load.ticket)
        if family is None:
            return
        siblings = self._families[family]
        siblings.remove(request_id)
        if not siblings:
            del self._families[family]

    def _let_go(self, request_id: str, load: _Load) -> None:
        """Answers the export without fetching it."""
        load.phase = _Phase.OVER
        if load.producer is None or load.leader is not None:
            return
        if load.ticket is not None:
            self._unwatches.append(request_id)
        heir = self._heir(request_id)
        if heir is None:
            self._declines.append(Decline(load.producer, load.references))
        else:
            self._watches.append(Watch(heir, load.producer, load.references, self._lease_s))

    def _heir(self, request_id: str) -> str | None:
        """The sibling that takes over from a request that will not fetch, now the leader of the others."""
        waiting = {
            name: load
            for name, load in self._loads.items()
            if load.leader == request_id and load.phase is _Phase.WAITING
        }
        heir = next(iter(waiting), None)
        for name, load in waiting.items():
            load.leader = None if name == heir else heir
        return heir

    def _unfetched(
        self, num_prompt_tokens: int, num_external_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> tuple[int, ...]:
        """The blocks behind what the request had already: those that a load was to fill, at least."""
        return tuple(
            block
            for ids, block_tokens in zip(block_ids, self._block_tokens, strict=False)
            for block in ids[max(num_prompt_tokens - num_external_tokens, 0) // block_tokens :]
            if block != NULL_BLOCK
        )

    def _order(
        self,
        request_id: str,
        ticket: Ticket,
        producer: ProducerAddress,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
        digest: Callable[[int], bytes],
    ) -> PullOrder:
        """Pairs the blocks of both ends by their position in the prompt."""
        if len(ticket.groups) != len(block_ids):
            raise LayoutError(
                f"the producer has `{len(ticket.groups)}` KV groups, this engine `{len(block_ids)}`",
                operation=_OPERATION,
                hint="both engines must serve the same model with the same KV cache groups",
            )
        into, first_blocks = [], []
        for at, (group, ids) in enumerate(zip(ticket.groups, block_ids, strict=True)):
            block_tokens = self._block_tokens[at]
            if group.block_tokens != block_tokens:
                raise LayoutError(
                    f"the producer's blocks hold `{group.block_tokens}` tokens, this engine's `{block_tokens}`",
                    operation=_OPERATION,
                    hint="start both engines with the same `--block-size`",
                )
            start = (ticket.num_tokens - num_external_tokens) // block_tokens
            end = -(-ticket.num_tokens // block_tokens)
            while start < end and start < len(ids) and ids[start] == NULL_BLOCK:
                start += 1
            wanted = tuple(ids[start:end])
            if start < end and (len(wanted) < end - start or NULL_BLOCK in wanted or start < group.first):
                raise LayoutError(
                    f"blocks `{start}..{end}` of group `{at}` are needed, the producer exported `{group.first}..{end}` "
                    f"and this engine allocated `{len(ids)}`",
                    operation=_OPERATION,
                )
            into.append(wanted)
            first_blocks.append(max(start - group.first, 0))
        return PullOrder(
            request_id=request_id,
            producer=producer,
            references=ticket.references,
            digest=digest(ticket.num_tokens) + ticket.seal(),
            into=tuple(into),
            first_blocks=tuple(first_blocks),
            num_tokens=num_external_tokens,
        )


def _family(request_id: str, ticket: Ticket) -> tuple[str, str] | None:
    """What children of one request that brought the same export have in common."""
    parent = parent_of(request_id)
    return None if parent is None else (parent, ticket.references[0][0])
