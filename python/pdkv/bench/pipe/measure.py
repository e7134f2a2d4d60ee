"""`--mode pipe`: a pair of large tensors by each transport beside its limit and other carriers, and many small ones.

The limit is that of the block bench for the same bytes in as few pages as there are threads: a contiguous span for
each, touched before. Turns alternate and start from freshly written bytes, as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from pdkv.bench import host, ucx_loop
from pdkv.bench.cases import Case
from pdkv.bench.latency import block_case
from pdkv.bench.limits import limit_for
from pdkv.bench.lines import Common, Line, Measured, make_lines
from pdkv.bench.measure import Bench
from pdkv.bench.pipe.ends import PipeMover
from pdkv.bench.pipe.exchange import Exchange, Way
from pdkv.bench.pipe.peers import ONCE, makers
from pdkv.bench.rivals import Entry, made
from pdkv.bench.tables import Fragmentation
from pdkv.bench.turns import take_turns

# How often the bytes of an exchange are in memory at once: at most in both ends, the limit's pools, and the peers.
_COPIES = 12


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures.

    Attributes:
        ways: The transports of the large exchange; the small one goes beside the first.
        large: A pair of tensors.
        small: Many small tensors, or nothing.
        peers: Other carriers to measure, keys of `PEERS`.
        far: Whether the producer may be on another machine.
    """

    ways: Sequence[Way]
    large: Exchange
    small: Exchange | None
    peers: Sequence[str]
    far: bool = False

    def steps(self, iters: int) -> int:
        """Says how many times `Bench.tick` is called."""
        return iters * (len(self.ways) + (self.small is not None))


def run(bench: Bench, plan: Plan, label: Callable[[str], None]) -> list[Line]:
    """Measures everything that was planned.

    Raises:
        PdkvError: A tensor did not arrive, or there is too little memory.
    """
    lines: list[Line] = []
    for way in plan.ways:
        label(f"{way.transport} {plan.large.label()}")
        peers = [name for name in plan.peers if way is plan.ways[0] or name not in ONCE]
        lines += exchange_lines(bench, replace(plan, peers=peers), way, plan.large, limits=bench.limits)
    if plan.small is not None:
        label(plan.small.label())
        lines += exchange_lines(bench, plan, plan.ways[0], plan.small, limits=False)
    return lines


def exchange_lines(bench: Bench, plan: Plan, way: Way, exchange: Exchange, *, limits: bool) -> list[Line]:
    """Measures one exchange by pdkv's pipe, its limit and its peers in turn.

    Raises:
        PdkvError: A tensor did not arrive, or there is too little memory.
    """
    host.require_memory(exchange.total_bytes * _COPIES, "this exchange and what is beside it")
    gate = host.QuietGate(bench.quiet_wait_s, budget_s=bench.quiet_wait_s * 30)
    with ExitStack() as stack:
        pipe = PipeMover(
            bench.kit, bench.producer, way, exchange.library, insecure=bench.insecure, timeout_s=bench.timeout_s
        )
        ours = Entry("pdkv", pipe.name, rival=pipe)
        stack.callback(ours.close)
        pipe.load(exchange)
        entries = [ours]
        if limits:
            side, opened = stack.enter_context(bench.opened(limit_case(way, exchange)))
            limit = limit_for(way.transport, bench.kit.native, side, bench.producer, opened)
            if way.transport == "ucx":
                limit = ucx_loop.Loop(bench.kit.native, side, bench.producer)
            if limit is not None:
                entries.append(Entry(limit.kind, limit.name, rival=limit))
                stack.callback(entries[-1].close)
        for name, make in makers(plan.peers, exchange, bench.timeout_s, far=plan.far):
            entries.append(made("peer", name, make))
            stack.callback(entries[-1].close)
        take_turns(bench, entries, gate)
        path, staged = pipe.path, pipe.staged_bytes
    common = Common(
        path=path,
        what=exchange.label(),
        items=exchange.count,
        total_bytes=exchange.total_bytes,
        threads=way.threads,
        streams=way.streams,
        seed=exchange.seed,
        versions=host.versions(),
        loads=gate.loads,
    )
    return make_lines(common, [_measured(one, staged if one is ours else 0) for one in entries])


def _measured(one: Entry, staged_bytes: int) -> Measured:
    # Both peers go by sockets, whatever pdkv does.
    path = "tcp" if one.kind == "peer" else ""
    return Measured(one.kind, one.name, one.seconds, one.wrong, staged_bytes, one.note, path)


def limit_case(way: Way, exchange: Exchange) -> Case:
    """Makes the case of the block bench that moves the same bytes: a contiguous page for each thread and stream."""
    parts = math.lcm(way.threads, way.streams)
    parts = parts if exchange.total_bytes % parts == 0 else 1
    case = block_case("write", way.transport, parts, way.threads, exchange.seed, exchange.total_bytes // parts)
    return replace(case, streams=way.streams, fragmentation=Fragmentation(0), slots_factor=1.0, ucx=way.ucx)
