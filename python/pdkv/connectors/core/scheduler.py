"""The scheduler side of a connector: producer, consumer and directory of one LLM engine behind one method a hook.

Decides and never waits. Token lists are not asked for until a digest is needed. What a request causes is never raised
into the LLM engine's loop: it becomes a refusal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdkv._core import Issuer
from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.consumer import Consumer
from pdkv.connectors.core.directory import Directory
from pdkv.connectors.core.params import asks_for_decode
from pdkv.connectors.core.producer import Exported, Producer
from pdkv.connectors.core.work import RankInfo, Work
from pdkv.errors import ConfigError, PdkvError

__all__ = ["SchedulerSide"]

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
        self._producer = Producer(engine_id, block_tokens, settings.kv_lease_duration) if produces else None
        self._consumer = (
            Consumer(engine_id, block_tokens, settings.kv_lease_duration, self._refused) if consumes else None
        )
        self._ranks: tuple[tuple[Issuer, ...], ...] = ()
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
        self._ranks = tuple(tuple(Issuer.from_bytes(data) for data in rank.issuers) for rank in known)
        if self._producer is not None and self._directory is None:
            self._directory = Directory(
                self.engine_id, known, self._settings.host, self._settings.port, insecure=self._settings.insecure
            )

    def arrived(self, request_id: str, params: Mapping[str, Any] | None, num_prompt_tokens: int) -> None:
        """A request came in."""
        if self._consumer is not None:
            self._consumer.arrived(request_id, params, num_prompt_tokens)

    def match(self, request_id: str, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the computed ones can be fetched: see `Consumer.match`."""
        return (0, False) if self._consumer is None else self._consumer.match(request_id, num_computed_tokens)

    def allocated(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
        digest: Callable[[int], bytes],
    ) -> None:
        """The request has blocks: see `Consumer.allocated`."""
        if self._consumer is not None:
            self._consumer.allocated(request_id, block_ids, num_external_tokens, digest)

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
        if self._consumer is not None:
            self._consumer.finished(request_id)
        if self._producer is None or not complete or not asks_for_decode(params) or self.port is None:
            return False, None
        try:
            finished = Exported(request_id, block_ids, num_tokens, digest(num_tokens))
            return self._producer.export(finished, self._ranks, self._settings.host, self.port, **self._sizes)
        except (PdkvError, OverflowError) as error:
            _log.error("request %s is not exported: %s", request_id, error)
            return False, None

    @property
    def pending(self) -> bool:
        """Whether the workers must be told something, even if no request runs."""
        sides = (self._producer, self._consumer)
        return any(side.pending for side in sides if side is not None)

    def take(self) -> Work:
        """What the workers are to do by the next step."""
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
        _log.warning("request %s: its kv_transfer_params are refused (%s): %s", request_id, error.kind, error.message)
