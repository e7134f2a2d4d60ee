"""Short transfers and side effects: one block, the submitting call, the GIL, an idle engine.

Each function measures one figure; `measure_all` gives them as `Figure`s. Values are medians.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pdkv.bench import host
from pdkv.bench.cases import Case
from pdkv.bench.measure import Bench, texts
from pdkv.bench.presets import raw
from pdkv.bench.rows import percentile
from pdkv.bench.tables import Fragmentation

_BLOCK = 4096
_IDLE_S = 5.0
_GIL_MOVES = 4  # transfers in one sample, so that starting and ending them weighs little


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: what, on which path, its value and the spread of it."""

    name: str
    transport: str
    value: float
    p99: float
    unit: str
    samples: int
    wrong: int = 0

    def to_json(self) -> dict[str, object]:
        """Gives plain values."""
        return asdict(self)


def block_case(op: str, transport: str, blocks: int, threads: int, seed: int, block_bytes: int = _BLOCK) -> Case:
    """Makes a case of a few raw blocks."""
    return Case(
        geometry=raw(block_bytes),
        op=op,
        transport=transport,
        block_tokens=1,
        blocks=blocks,
        requests=1,
        threads=threads,
        streams=1,
        fragmentation=Fragmentation(1),
        layout="LBHNC",
        memory="auto",
        slots_factor=2.0,
        seed=seed,
    )


def one_block_read(bench: Bench, transport: str, seed: int, samples: int = 2000) -> Figure:
    """Measures a raw read of one 4 KiB block, from the Python call until completion was seen."""
    case = block_case("read", transport, 1, 1, seed)
    with bench.opened(case) as (side, opened):
        bench.producer.ask("fill", stamp=1)
        remote = bench.kit.pdkv.RegionDescriptor.from_json(str(opened["region"]))
        at, since = int(side.pages.offsets(side.ids)[0]), int(side.pages.offsets(case.tables("src")[0])[0])
        ours, theirs = side.region.span(at, case.page_bytes), remote.span(since, case.page_bytes)
        peer, require = side.peer, case.required

        def once() -> None:
            peer.read(ours, theirs, require=require).wait()

        spent = _repeat(once, samples)
        return _figure("one-block read", transport, spent, side.find_wrong(1).wrong_bytes)


def one_block_pull(bench: Bench, transport: str, seed: int, samples: int = 1000) -> Figure:
    """Measures a pull of one 4 KiB block, claim and fence included, connecting excluded."""
    case = block_case("pull", transport, 1, 1, seed)
    warm = samples // 10
    with bench.opened(case) as (side, _):
        bench.producer.ask("fill", stamp=1)
        reference, require = _reference(bench, samples + warm), case.required
        cache, ids = side.cache, side.tables[0]

        def once() -> None:
            cache.pull(reference, into=ids, require=require).wait()

        spent = _repeat(once, samples)
        return _figure("one-block pull", transport, spent, side.find_wrong(1).wrong_bytes)


def submit(bench: Bench, transport: str, seed: int, samples: int = 100) -> Figure:
    """Measures what submitting a pull of 4,096 blocks (numpy ids) costs the caller."""
    case = block_case("pull", transport, 4096, host.default_threads(), seed)
    warm = samples // 10
    with bench.opened(case) as (side, _):
        bench.producer.ask("fill", stamp=1)
        reference = _reference(bench, samples + warm)
        spent: list[float] = []
        for i in range(samples + warm):
            started = time.perf_counter()
            transfer = side.cache.pull(reference, into=side.tables[0], require=case.required)
            took = time.perf_counter() - started
            transfer.wait(timeout_s=bench.timeout_s)
            if i >= warm:
                spent.append(took)
        return _figure("submit 4,096 blocks", transport, spent, side.find_wrong(1).wrong_bytes)


def gil_loss(bench: Bench, transport: str, seed: int, samples: int = 7) -> Figure:
    """Measures how much slower a second Python thread counts while this one waits for a transfer.

    One copy thread, so that on two cores the counting thread has one to itself; time in which it was ready
    but another thread had the core is left out, so that what remains is the GIL.
    """
    case = replace(block_case("pull", transport, 1 << 16, 1, seed), slots_factor=1.0)
    with bench.opened(case) as (side, _):
        bench.producer.ask("fill", stamp=1)
        wanted = texts(bench.producer.ask("publish", consumers=samples * _GIL_MOVES + 1)["references"])
        took = side.move(wanted).seconds
        losses: list[float] = []
        with Counter() as counter:
            for _ in range(samples):
                alone = counter.rate(lambda: time.sleep(took * _GIL_MOVES))
                during = counter.rate(lambda: [side.move(wanted) for _ in range(_GIL_MOVES)])
                losses.append((1 - during / alone) * 100)
        wrong = side.find_wrong(1).wrong_bytes
    middle, worst = statistics.median(losses), max(losses)
    return Figure("GIL: counting loses", transport, round(middle, 2), round(worst, 2), "%", samples, wrong)


def idle_cpu(bench: Bench, peers: int = 10) -> Figure:
    """Measures the CPU share of this process while its engine sits idle with ten connected peers."""
    addresses = texts(bench.producer.ask("idle", count=peers)["addresses"])
    with bench.kit.pdkv.Engine("idle", listen=None) as engine:
        connected = [engine.connect(address, timeout_s=10.0) for address in addresses]
        time.sleep(0.5)
        started, used = time.monotonic(), time.process_time()
        time.sleep(_IDLE_S)
        share = (time.process_time() - used) / (time.monotonic() - started) * 100
        for peer in connected:
            peer.close()
    bench.producer.ask("close")
    return Figure(f"idle with {peers} peers", "-", round(share, 3), round(share, 3), "% of a core", 1)


class Counter:
    """A Python thread that counts as fast as it can, as long as the context lasts."""

    def __init__(self) -> None:
        self._count = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="bench-counter", daemon=True)

    def __enter__(self) -> Counter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stop:
            self._count += 1

    def rate(self, work: Callable[[], object]) -> float:
        """Gives counts per second that the thread was not kept off the cores, while `work` runs in the caller."""
        counted, started, waited = self._count, time.perf_counter(), self._waited_s()
        work()
        spent = time.perf_counter() - started - (self._waited_s() - waited)
        return (self._count - counted) / spent

    def _waited_s(self) -> float:
        """How long the counting thread was ready to run but had no core, as the kernel counts it."""
        try:
            stat = Path(f"/proc/self/task/{self._thread.native_id}/schedstat").read_text(encoding="ascii")
        except OSError:
            return 0.0
        return int(stat.split()[1]) / 1e9


def measure_all(bench: Bench, transports: list[str], seed: int) -> list[Figure]:
    """Measures every figure of `--mode latency` on each transport.

    Raises:
        PdkvError: A transfer failed.
    """
    figures: list[Figure] = []
    for transport in transports:
        for measure in (one_block_read, one_block_pull, submit, gil_loss):
            figures.append(measure(bench, transport, seed))
            bench.tick()
    return figures


def _reference(bench: Bench, consumers: int) -> Any:
    references = texts(bench.producer.ask("publish", consumers=consumers)["references"])
    return bench.kit.pdkv.Reference.from_json(references[0])


def _repeat(once: Callable[[], None], samples: int) -> list[float]:
    for _ in range(samples // 10):
        once()
    spent = []
    for _ in range(samples):
        started = time.perf_counter()
        once()
        spent.append(time.perf_counter() - started)
    return spent


def _figure(name: str, transport: str, spent: list[float], wrong: int) -> Figure:
    middle, worst = statistics.median(spent) * 1e6, percentile(spent, 0.99) * 1e6
    return Figure(name, transport, round(middle, 2), round(worst, 2), "us", len(spent), wrong)
