"""The scheduler side of a connector: producer, consumer and directory of one LLM engine behind one method a hook.

Decides and never waits. Token lists are not asked for until a digest is needed. What a request causes is never raised
into the LLM engine's loop: it becomes a refusal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pdkv._core import Issuer, __version__
from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.consumer import Consumer
from pdkv.connectors.core.directory import Directory
from pdkv.connectors.core.params import asks_for_decode
from pdkv.connectors.core.producer import Exported, Producer, RankMint
from pdkv.connectors.core.reading import Reader
from pdkv.connectors.core.shown import shown
from pdkv.connectors.core.work import RankInfo, Work
from pdkv.errors import ConfigError, PdkvError

__all__ = ["SchedulerSide"]

_T = TypeVar("_T")
_log = logging.getLogger("pdkv.connectors")


class SchedulerSide:
    """One LLM engine's scheduler side.

    Args:
        engine_id: The LLM engine, unique among all that ever meet.
        settings: What the user set.
        block_tokens: For each KV group, tokens in a block.
        tp_size: Ranks that share the heads.
        pp_size: Ranks that share the layers.
        produces: Whether other engines may fetch from this one.
        consumes: Whether this one may fetch from others.

    Attributes:
        step: How many steps `take` was called for.
    """

    def __init__(
        self,
        engine_id: str,
        settings: Settings,
        block_tokens: Sequence[int],
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        produces: bool,
        consumes: bool,
    ) -> None:
        self.engine_id = engine_id
        self._settings = settings
        self._sizes = {"tp_size": tp_size, "pp_size": pp_size}
        key, lease_s = settings.signing_key(), settings.kv_lease_duration
        self._reader = reader = Reader(block_tokens, **self._sizes, key=key)
        self._producer = Producer(engine_id, block_tokens, lease_s, key) if produces else None
        self._consumer = Consumer(engine_id, reader, block_tokens, lease_s, self._refused) if consumes else None
        self._ranks: tuple[RankMint, ...] = ()
        self.step = 0
        self._last_steps = dict[str, int]()  # of requests that are to be exported
        self._directory: Directory | None = None

    @property
    def port(self) -> int | None:
        """Port of the directory; `None` while there is none."""
        return None if self._directory is None else self._directory.port

    def set_ranks(self, ranks: Iterable[RankInfo]) -> None:
        """Takes what the ranks told at start-up, and opens the directory.

        Raises:
            ConfigError: A rank is missing or there twice, or the directory can't listen where it should.
        """
        known = sorted(ranks, key=lambda rank: (rank.pp_rank, rank.tp_rank))
        places = [(rank.pp_rank, rank.tp_rank) for rank in known]
        expected = [(pp, tp) for pp in range(self._sizes["pp_size"]) for tp in range(self._sizes["tp_size"])]
        if places != expected:
            raise ConfigError(f"ranks `{places}` told where they are, not `{expected}`", operation="connector start")
        self._ranks = tuple(RankMint(tuple(map(Issuer.from_bytes, rank.issuers)), rank.cache_groups) for rank in known)
        if any(rank.cache_groups for rank in known):
            self._reader.expect([len(rank.issuers) for rank in known])
        if self._producer is not None and self._directory is None:
            self._directory = Directory(
                self.engine_id, known, self._settings.host, self._settings.port, insecure=self._settings.insecure
            )
            where = f"directory at {self._settings.host}:{self.port}"
            _log.info("pdkv %s hands KV over: %s, %s", __version__, where, self._told_of_secret())
        if self._consumer is not None:
            hosts = self._settings.places
            whom = "any host" if hosts is None else f"hosts {', '.join(hosts)}"
            _log.info("pdkv %s fetches KV from %s, %s", __version__, whom, self._told_of_secret())

    def _told_of_secret(self) -> str:
        return "answers are signed" if self._settings.secret_file is not None else "answers are not signed"

    def arrived(self, request_id: str, params: Mapping[str, Any] | None, num_prompt_tokens: int) -> None:
        """A request came in."""
        if self._producer is not None and asks_for_decode(params):
            self._last_steps[request_id] = 0
        consumer = self._consumer
        if consumer is not None:
            _guarded("arrived", lambda: consumer.arrived(request_id, params, num_prompt_tokens), None)

    def turned_down(self, params: Mapping[str, Any] | None) -> None:
        """A request came in for which nothing can be fetched: its producer is let go."""
        consumer = self._consumer
        if consumer is not None:
            _guarded("turned_down", lambda: consumer.turned_down(params), None)

    def match(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the computed ones can be fetched: see `Consumer.match`."""
        consumer = self._consumer
        if consumer is None:
            return 0, False
        nothing: tuple[int | None, bool] = (0, False)
        return _guarded("match", lambda: consumer.match(request_id, num_computed_tokens), nothing)

    def allocated(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
        digest: Callable[[int], bytes],
    ) -> None:
        """The request has blocks: see `Consumer.allocated`."""
        consumer = self._consumer
        if consumer is not None:
            # Whatever happens to a load that is waited for is a refusal already.
            _guarded("allocated", lambda: consumer.allocated(request_id, block_ids, num_external_tokens, digest), None)

    def finished(
        self,
        request_id: str,
        params: Mapping[str, Any] | None,
        block_ids: tuple[Sequence[int], ...],
        num_tokens: int,
        digest: Callable[[int], bytes],
        *,
        complete: bool,
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over.

        Args:
            request_id: The request.
            params: Its parameters.
            block_ids: For each KV group, its blocks in the order of the tokens.
            num_tokens: Tokens of its prompt whose KV is computed.
            digest: Gives the digest of the first so many tokens of the prompt.
            complete: Whether it ended as a request should; one that was aborted or failed is not exported.

        Returns:
            Whether its blocks stay until every rank has reported the request as sent, and what the client gets.
        """
        consumer, producer, port = self._consumer, self._producer, self.port
        # Of one that was never seen in a step it is not known, and the newest is late enough.
        step = self._last_steps.pop(request_id, 0) or self.step
        if consumer is not None:
            _guarded("finished", lambda: consumer.finished(request_id), None)
        if producer is None or not complete or not asks_for_decode(params) or port is None:
            return False, None

        def export() -> tuple[bool, dict[str, Any] | None]:
            finished = Exported(request_id, block_ids, num_tokens, digest(num_tokens), step)
            return producer.export(finished, self._ranks, self._settings.host, port, **self._sizes)

        nothing: tuple[bool, dict[str, Any] | None] = (False, None)
        return _guarded("export", export, nothing)

    @property
    def pending(self) -> bool:
        """Whether the workers must be told something, even if no request runs."""
        sides = (self._producer, self._consumer)
        return any(side.pending for side in sides if side is not None)

    def take(self, scheduled: Collection[str] = ()) -> Work:
        """What the workers are to do by the next step.

        Args:
            scheduled: The requests that the step computes tokens of.
        """
        self.step += 1
        alive = self._last_steps
        for request_id in alive if len(alive) < len(scheduled) else scheduled:
            if request_id in alive and request_id in scheduled:
                alive[request_id] = self.step
        work = Work.NOTHING if self._consumer is None else self._consumer.take()
        exports = () if self._producer is None else self._producer.take()
        return replace(work, exports=exports) if exports else work

    def ended(self, sent: Iterable[str], received: Iterable[str]) -> None:
        """Takes what all ranks have reported."""
        if self._producer is not None:
            self._producer.ended(sent)
        if self._consumer is not None:
            self._consumer.loaded(received)

    def close(self) -> None:
        """Closes the directory. Twice is no error."""
        if self._directory is not None:
            self._directory.close()

    def _refused(self, request_id: str, error: PdkvError) -> None:
        _log.warning(
            "request `%s`: its kv_transfer_params are refused (%s): %s%s",
            shown(request_id),
            error.kind,
            error.message,
            f"; {error.hint}" if error.hint else "",
        )


def _guarded(what: str, call: Callable[[], _T], otherwise: _T) -> _T:
    """Calls; a bug of ours, or what nobody thought of, ends in `otherwise` and a log entry, not in the LLM engine."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - as said
        _log.exception("`%s` failed; the request goes on without a transfer", what)
        return otherwise
