"""What pipes and lookup buffers promise: a pair of large tensors, many small ones, one prompt among many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from pdkv.bench.floor import Floor, checked
from pdkv.bench.lines import Line
from pdkv.bench.lookup import measure as lookup_measure
from pdkv.bench.lookup.prompts import Prompts
from pdkv.bench.measure import Bench
from pdkv.bench.pipe import measure as pipe_measure
from pdkv.bench.pipe.exchange import SHAPE, SMALL_BYTES, Exchange, Way, installed_library
from pdkv.bench.pipe.peers import PEERS
from pdkv.errors import CapacityError

TRANSPORTS = ("shm", "cma", "tcp")
PAIR_RATIO = 0.85
# Of the transport that a user gets on one host. Sockets have a limit of their own, and gloo comes near it.
PEER_RATIOS = {"gloo": 2.0, "pickle": 10.0}
SMALL, SMALL_PER_S = 10_000, 50_000
ENTRIES, TOKENS, SCAN_RATIO = 10_000, 2048, 100.0


def steps() -> int:
    """Says how many times `Bench.tick` is called."""
    return 2


def run(bench: Bench, seed: int, threads: int, label: Callable[[str], None]) -> tuple[list[Floor], list[Line]]:
    """Measures these floors; gives them and the lines behind them. Without the memory a floor says so.

    Raises:
        PdkvError: Something did not arrive.
    """
    library, tick = installed_library(), bench.tick
    quiet = replace(bench, tick=lambda: None)
    plan = pipe_measure.Plan(
        ways=[Way(transport, threads, 1) for transport in TRANSPORTS],
        large=Exchange(SHAPE, "bfloat16", 2, library, threads, seed),
        small=Exchange((SMALL_BYTES,), "uint8", SMALL, library, threads, seed),
        peers=tuple(PEERS),
    )
    prompts = Prompts(ENTRIES, TOKENS, library, seed)
    suites: list[tuple[str, Callable[[], list[Line]], Callable[[Sequence[Line]], Iterator[Floor]]]] = [
        ("pipe", partial(pipe_measure.run, quiet, plan, label), pipe_floors),
        ("lookup", partial(lookup_measure.run, quiet, prompts, [], label), lookup_floors),
    ]
    floors: list[Floor] = []
    lines: list[Line] = []
    for name, measure, judge in suites:
        try:
            measured = measure()
        except CapacityError as error:
            floors.append(Floor(name, "enough memory to be measured", "-", None, str(error).splitlines()[0]))
        else:
            floors += judge(measured)
            lines += measured
        tick()
    return floors, lines


def pipe_floors(lines: Sequence[Line]) -> Iterator[Floor]:
    """Judges the lines of a pipe."""
    for transport in TRANSPORTS:
        name, bound = f"{transport} pipe, a pair", f">= {PAIR_RATIO} of the limit"
        pair = next((line for line in lines if line.kind == "pdkv" and line.path == transport), None)
        if pair is None or pair.ratio is None:
            yield Floor(name, bound, "-", ok=False, note="it has no line, or none of its limit")
            continue
        note = f"{pair.gb_per_s or 0:.2f} of {pair.limit_gb_per_s or 0:.2f} GB/s, {pair.what}, {pair.threads} threads"
        ok = pair.ratio >= PAIR_RATIO and pair.wrong == 0
        yield Floor(name, bound, f"{pair.ratio:.3f}", ok, checked(note, pair.wrong))
    for peer, least in PEER_RATIOS.items():
        # The first one stands beside the first transport.
        line = next(line for line in lines if line.kind == "peer" and line.name == PEERS[peer][0])
        yield faster(line, f"{TRANSPORTS[0]} pipe against {line.name}", least)
    small = next(line for line in lines if line.kind == "pdkv" and line.items == SMALL)
    per_s = small.items_per_s or 0
    note = f"worst {small.items * 1e6 / small.p99_us:,.0f}" if small.p99_us else ""
    ok = per_s >= SMALL_PER_S and small.wrong == 0
    yield Floor(f"pipe {small.what}", f">= {SMALL_PER_S:,} a second", f"{per_s:,.0f}", ok, checked(note, small.wrong))


def lookup_floors(lines: Sequence[Line]) -> Iterator[Floor]:
    """Judges the lines of a lookup buffer: both the one of this process and the one of another are held to the scan."""
    for scan in (line for line in lines if line.kind == "peer"):
        for name in (lookup_measure.LOCAL, lookup_measure.REMOTE):
            ours = next(line for line in lines if line.name == name and line.what == scan.what)
            ratio = scan.p50_us / ours.p50_us
            note = f"{ours.p50_us:,.0f} of {scan.p50_us:,.0f} us, {scan.name}"
            wrong = ours.wrong + scan.wrong
            yield Floor(
                f"{name}: {scan.what}",
                f">= {SCAN_RATIO:g}x the scan",
                f"{ratio:,.0f}x",
                ratio >= SCAN_RATIO and wrong == 0,
                checked(note, wrong),
            )


def faster(peer: Line, name: str, least: float) -> Floor:
    """Judges how many times the rate of a peer pdkv has."""
    bound, ratio = f">= {least:g}x", peer.pdkv_ratio
    if ratio is None:
        return Floor(name, bound, "-", None, peer.note)
    note = f"{peer.gb_per_s or 0:.2f} GB/s, {peer.note}"
    return Floor(name, bound, f"{ratio:.1f}x", ratio >= least and peer.wrong == 0, checked(note, peer.wrong))
