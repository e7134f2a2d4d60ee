"""One end of a case: an engine, its pages, and the transfers it starts. Both roles are this class.

It uses the public Python API only, as any user would. It does not know the other process: what it needs
from there (references, offers, addresses) comes in as text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from pdkv.bench import pattern
from pdkv.bench.cases import Case
from pdkv.bench.device_pages import make_pages
from pdkv.bench.tables import Ids
from pdkv.errors import ConfigError, PdkvError


@dataclass(frozen=True, slots=True)
class Timing:
    """What one measured iteration took: of transfers in flight at once the slowest, planning and posting added up."""

    seconds: float
    plan_us: float
    post_us: float
    wire_us: float
    handover_us: float
    staged_bytes: int
    runs: int
    path: str
    detail: str = ""

    @classmethod
    def from_json(cls, value: object) -> Timing:
        """Reads `to_json` back.

        Raises:
            ConfigError: It is not a timing.
        """
        try:
            return cls(**value)  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError("the producer's answer is not a timing") from error

    def to_json(self) -> dict[str, object]:
        """Gives plain values for the control channel."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Toolkit:
    """What a side is made with: the library, or a stand-in for it in tests."""

    pdkv: Any
    native: Any

    @classmethod
    def real(cls) -> Toolkit:
        """Gives the library itself."""
        import pdkv
        from pdkv import _core

        return cls(pdkv, _core)


class Side:
    """The producer's or the consumer's half of one case. Use as a context manager."""

    def __init__(self, kit: Toolkit, case: Case, role: str, listen: str, *, insecure: bool, timeout_s: float) -> None:
        """Builds the engine and the pages and registers them."""
        self.case, self.role, self._kit, self._timeout_s = case, role, kit, timeout_s
        self.end = "src" if role == "producer" else "dst"
        self.tables = case.tables(self.end)
        self.ids = np.concatenate(self.tables)
        self.engine: Any = kit.pdkv.Engine(
            f"bench-{role}",
            listen=listen,
            threads=case.threads,
            tcp_streams=case.streams,
            insecure=insecure,
            lease_s=timeout_s,
            **(case.ucx.engine_options(kit.pdkv) if case.transport == "ucx" else {}),
        )
        try:
            self.pages = make_pages(case, self.engine, kit.native)
            adopt = case.where == "adopt"
            self.cache: Any = None
            self.region: Any = None
            if case.op in ("read", "write"):
                self.region = self.engine.register(self.pages.whole, adopt=adopt)
            else:
                self.cache = self.engine.register_kv_cache(
                    self.pages.tensors(),
                    layout="BHNC",
                    block_tokens=case.block_tokens,
                    model=case.geometry.name,
                    adopt=adopt,
                )
            everything = np.arange(case.pool_blocks, dtype=np.int64)
            self.pages.fill(everything, pattern.CANARY_STAMP, kit.native)
        except BaseException:
            self.engine.close()
            raise
        self.peer: Any = None
        self._exports: list[Any] = []

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives everything back; idempotent."""
        self.release()
        self.engine.close()

    def describe(self) -> dict[str, object]:
        """Says what the other side needs: where to connect, and the raw region if there is one."""
        region = None if self.region is None else self.region.describe().to_json()
        return {"address": self.engine.address, "region": region}

    def connect(self, address: str) -> None:
        """Connects to the other engine; never part of a measured time."""
        self.peer = self.engine.connect(address, timeout_s=self._timeout_s)

    def fill(self, stamp: int) -> None:
        """Writes fresh bytes into the blocks of the table."""
        self.pages.fill(self.ids, stamp, self._kit.native)

    def find_wrong(self, stamp: int) -> pattern.Found:
        """Checks every byte of the table's blocks against the producer's blocks of `stamp`."""
        origins = np.concatenate(self.case.tables("src"))
        return self.pages.find_wrong(self.ids, origins, stamp, self._kit.native)

    def find_touched(self) -> pattern.Found:
        """Checks that no byte outside the table's blocks was ever written."""
        others = self.pages.others(self.ids)
        return self.pages.find_wrong(others, others, pattern.CANARY_STAMP, self._kit.native)

    def publish(self, consumers: int = 1) -> list[str]:
        """Exports (producer) or offers (consumer) the table of every request; gives the references."""
        self.release()
        for ids in self.tables:
            tokens = len(ids) * self.case.block_tokens
            if self.role == "producer":
                made = self.cache.export(ids, num_tokens=tokens, consumers=consumers, lease_s=self._timeout_s)
            else:
                made = self.cache.offer(ids, num_tokens=tokens, lease_s=self._timeout_s)
            self._exports.append(made)
        return [made.reference.to_json() for made in self._exports]

    def release(self) -> None:
        """Ends what `publish` made; idempotent."""
        exports, self._exports = self._exports, []
        for export in exports:
            export.release()

    def move(self, wanted: Sequence[str]) -> Timing:
        """Moves all requests at once and waits for them.

        Args:
            wanted: References to pull, offers to push to, or the one region to read from or write to.

        Raises:
            PdkvError: A transfer failed.
        """
        posts = self._posts(wanted)
        started = time.perf_counter()
        transfers = [post() for post in posts]
        for transfer in transfers:
            transfer.wait(timeout_s=self._timeout_s)
        seconds = time.perf_counter() - started
        stats = [transfer.stats for transfer in transfers]
        paths = sorted({str(transfer.path) for transfer in transfers})
        if self.case.required is not None and paths != [self.case.required]:
            raise PdkvError(f"`{self.case.required}` was required, the path was `{','.join(paths)}`")
        return Timing(
            seconds=seconds,
            plan_us=sum(stat.plan_us for stat in stats),
            post_us=sum(stat.post_us for stat in stats),
            wire_us=max(stat.wire_us for stat in stats),
            handover_us=max(stat.handover_us for stat in stats),
            staged_bytes=sum(stat.staged_bytes for stat in stats),
            runs=sum(stat.runs for stat in stats),
            path=",".join(paths),
            detail="; ".join(sorted({str(transfer.path.detail) for transfer in transfers})),
        )

    def _posts(self, wanted: Sequence[str]) -> list[Callable[[], Any]]:
        case, common = self.case, {"timeout_s": self._timeout_s, "require": self.case.required}
        if case.op in ("pull", "push"):
            references = [self._kit.pdkv.Reference.from_json(text) for text in wanted]
            if len(references) != len(self.tables):
                raise ConfigError(f"`{len(references)}` references came for `{len(self.tables)}` requests")
            start = self._pull if case.op == "pull" else self.cache.push
            return [
                partial(start, reference, ids, **common) for reference, ids in zip(references, self.tables, strict=True)
            ]
        remote = self._kit.pdkv.RegionDescriptor.from_json(wanted[0])
        theirs = case.tables("src" if self.end == "dst" else "dst")
        ours = [(self.region, self.pages.spans(ids)) for ids in self.tables]
        far = [(remote, self.pages.spans(ids)) for ids in theirs]
        if case.op == "read":
            return [partial(self.peer.read, dst, src, **common) for dst, src in zip(ours, far, strict=True)]
        return [partial(self.peer.write, dst, src, **common) for dst, src in zip(far, ours, strict=True)]

    def _pull(self, reference: Any, ids: Ids, **options: Any) -> Any:
        return self.cache.pull(reference, into=ids, **options)


def idle_engines(kit: Toolkit, count: int) -> list[Any]:
    """Starts engines that only listen: the peers of an idle engine."""
    return [kit.pdkv.Engine(f"idle-{i}", listen="127.0.0.1:0") for i in range(count)]
