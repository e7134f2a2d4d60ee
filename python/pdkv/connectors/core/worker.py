"""The worker side of a connector: one rank's engine and caches, carrying out what its scheduler side orders.

Never blocks its caller and raises nothing that a request caused: a failure is reported as the request's. `carry`,
`results` and `close` are for one thread, the LLM engine's. Knows no LLM engine and no tensor library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from pdkv.connectors.core.caches import GroupCache, describe, numbered, register
from pdkv.connectors.core.config import Settings
from pdkv.connectors.core.declines import Declines
from pdkv.connectors.core.device import Device, Steps
from pdkv.connectors.core.dial import Dialler
from pdkv.connectors.core.exports import Exports
from pdkv.connectors.core.leases import Leases
from pdkv.connectors.core.line import Line, Place
from pdkv.connectors.core.load import Kit
from pdkv.connectors.core.places import Places
from pdkv.connectors.core.pulls import Pulls
from pdkv.connectors.core.stats import Stats
from pdkv.connectors.core.work import ProducerAddress, RankInfo, Results, Work
from pdkv.engine import Engine
from pdkv.errors import ConfigError

__all__ = ["WorkerSide"]

_log = logging.getLogger("pdkv.connectors")

_Order = TypeVar("_Order")
# How long another instance's load may keep our blocks at least: as long as by an engine's default.
_CLAIM_S = 120.0
# How long a connection that no request uses stays.
_IDLE_S = 300.0
# How long closing waits until no transfer touches the memory any more, and for threads, which may be dialling.
_QUIET_S = 5.0
_THREADS_S = 1.0


class WorkerSide:
    """One rank.

    Args:
        name: How peers know its engine.
        settings: What the user set.
        groups: Its caches, those of the first group first.
        model: Name of the weights and of whatever else both ends must have in common.
        tp_rank: Position among the ranks that share the heads.
        tp_size: How many those are.
        pp_rank: Position among the ranks that share the layers.
        pp_size: How many those are.
        device: Where the caches are, unless it is the CPU's memory. Then `begin_step` must be called at each step.
        num_groups: How many groups there are, where that is not how many have a cache here.

    Attributes:
        info: What the scheduler side has to know of this rank. Holds secrets.
        stats: What it has done.

    Raises:
        ConfigError: A setting can't be.
        LayoutError: A tensor contradicts its layout.
        RegionError: The memory can't be registered; says why.
        UnsupportedError: It is device memory.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        groups: Sequence[GroupCache],
        *,
        model: str = "",
        tp_rank: int = 0,
        tp_size: int = 1,
        pp_rank: int = 0,
        pp_size: int = 1,
        device: Device | None = None,
        num_groups: int | None = None,
    ) -> None:
        self._steps = None if device is None else Steps(device)
        self.stats = Stats()
        rank = pp_rank * tp_size + tp_rank
        self._engine = _engine(name, settings, rank)
        try:
            names = [name for _, name in numbered(groups)]
            caches = [
                register(self._engine, group, name, model, adopt=settings.adopt)
                for group, name in zip(groups, names, strict=True)
            ]
            facts = tuple(
                describe(cache, group, name, model) for cache, group, name in zip(caches, groups, names, strict=True)
            )
            group_of = tuple(index for index, _ in numbered(groups))
            num_groups = len(set(group_of)) if num_groups is None else num_groups
            self.info = RankInfo(
                tp_rank=tp_rank,
                pp_rank=pp_rank,
                address=str(self._engine.address),
                incarnation=self._engine.incarnation,
                issuers=tuple(cache.issuer().to_bytes() for cache in caches),
                groups=facts,
                cache_groups=() if group_of == tuple(range(num_groups)) else group_of,
            )
            place = Place(tp_rank, tp_size, pp_rank, pp_size, facts)
            kit = self._kit = Kit(self._engine, caches, group_of, num_groups, place, settings, self.stats, device)
            places = Places(settings.places)

            def make_line(producer: ProducerAddress) -> Line:
                return Line(producer, self._engine, kit.place, places, settings.connect_timeout)

            self._dialler = Dialler(make_line, max(_IDLE_S, 2 * settings.transfer_timeout))
            self._leases = Leases(kit, self._dialler)
            self._exports = Exports(kit, self._steps)
            self._declines = Declines(kit, self._dialler, self._exports.release)
            self._pulls = Pulls(kit, self._dialler, self._declines, self._leases.unwatch)
        except BaseException:
            self._engine.close()
            raise
        self._closed = False

    def begin_step(self, number: int) -> None:
        """A step begins, of which nothing was given to the device yet. Numbers grow."""
        if self._steps is not None and not self._closed:
            _each((number,), self._steps.begin)

    def carry(self, work: Work) -> None:
        """Begins what a step brings. Takes microseconds an order, and waits for nobody."""
        if self._closed or not work:
            return
        _each(work.unwatches, self._leases.unwatch)
        _each(work.cancels, self._pulls.cancel)
        _each(work.exports, self._exports.begin, self._exports.give_up)
        _each(work.watches, self._leases.watch)
        _each(work.pulls, self._pulls.begin, self._pulls.give_up)
        _each(work.refusals, self._pulls.refuse)
        _each(work.declines, self._declines.order)

    def results(self) -> Results:
        """Gives what has ended since the last call. Takes time for that only, not for what goes on."""
        results = Results()
        _each((results,), self._exports.collect)
        _each((results,), self._pulls.collect)
        return results

    def close(self) -> None:
        """Cancels what runs, ends the exports and all connections. Bounded; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        _each((_THREADS_S,), self._leases.close)
        _each((_QUIET_S,), self._pulls.close)
        _each((self._exports,), Exports.close)
        _each((_THREADS_S,), self._dialler.close)
        self._engine.close()


def _engine(name: str, settings: Settings, rank: int) -> Engine:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    port = settings.engine_port and settings.engine_port + rank
    listen = f"{host}:{port}"
    try:
        return Engine(
            name,
            listen=listen,
            transports=settings.transports,
            threads=settings.threads,
            insecure=settings.insecure,
            lease_s=settings.kv_lease_duration,
            max_claim_s=max(_CLAIM_S, settings.transfer_timeout),
            ucx=settings.ucx_config(),
            staging_bytes=settings.staging_bytes,
            staging_patience_s=settings.staging_patience,
            verify_copies=settings.verify_copies,
        )
    except ConfigError as error:
        if error.operation != "listen":
            raise
        text = "every rank listens at `host`: ranks on other machines than the scheduler are not supported yet"
        raise ConfigError(
            f"rank `{rank}` can't listen: {error.message}", operation=error.operation, hint=f"{error.hint}; {text}"
        ) from error


def _each(
    orders: Sequence[_Order], carry_out: Callable[[_Order], None], give_up: Callable[[_Order], None] | None = None
) -> None:
    for order in orders:
        try:
            carry_out(order)
        except Exception:  # noqa: BLE001 - a bug of ours in one request must not end the LLM engine
            _log.exception("%s could not be carried out: a bug", getattr(carry_out, "__qualname__", carry_out))
            if give_up is not None:
                with suppress(Exception):  # an order that can't even be read
                    give_up(order)
