"""What is measured: one frozen `Case` per combination of the axes asked for. Pure; it travels as JSON.

A case fixes the bytes, the tables and the way; it knows neither engine nor sockets. Both processes
derive the same tables from it, so none are sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pdkv.bench.presets import ITEM_BYTES, Geometry
from pdkv.bench.tables import Fragmentation, Ids, block_tables, pool_blocks
from pdkv.bench.ucx import Ucx
from pdkv.errors import ConfigError

OPS = ("pull", "push", "read", "write")
TRANSPORTS = ("auto", "inproc", "cuda", "shm", "cma", "tcp", "ucx")
MEMORY = ("auto", "pool", "private", "adopt", "cuda")
LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
_MAX_LAYERS = 4095  # the pattern names layers with 12 bits
_MAX_PAGES = 1 << 26


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be measured.

    Attributes:
        geometry: What a token leaves in the cache.
        op: `pull` and `push` go through export or offer, claim and fence; `read` and `write` are raw.
        transport: `auto`, or the one that is required.
        block_tokens: Tokens per block.
        blocks: Blocks per request.
        requests: Transfers in flight at once (`--burst`).
        threads: Copy threads of each engine, and of the limit.
        streams: TCP data streams, and those of the limit.
        fragmentation: How scattered both tables are.
        layout: vLLM's name for the order of the axes in memory.
        memory: Who allocates the pages: `pool` pdkv, `private` the process, `adopt` the process with `adopt=True`,
            `cuda` pdkv on the first GPU.
        slots_factor: Pool blocks per moved block.
        seed: Draws the tables and the pattern.
        ucx: How UCX is to be used, by the transport of that name and by what is measured beside it.
    """

    geometry: Geometry
    op: str
    transport: str
    block_tokens: int
    blocks: int
    requests: int
    threads: int
    streams: int
    fragmentation: Fragmentation
    layout: str
    memory: str
    slots_factor: float
    seed: int
    ucx: Ucx = field(default_factory=Ucx)

    def __post_init__(self) -> None:
        for what, value, allowed in (
            ("op", self.op, OPS),
            ("transport", self.transport, TRANSPORTS),
            ("layout", self.layout, LAYOUTS),
            ("memory", self.memory, MEMORY),
            ("dtype", self.geometry.dtype, tuple(ITEM_BYTES)),
        ):
            if value not in allowed:
                raise ConfigError(f"`{value}` is no `{what}`", hint=f"use one of {', '.join(allowed)}")
        for what, number in (
            ("layers", self.geometry.layers),
            ("kv_heads", self.geometry.kv_heads),
            ("content", self.geometry.content),
            ("block_tokens", self.block_tokens),
            ("blocks", self.blocks),
            ("requests", self.requests),
            ("threads", self.threads),
            ("streams", self.streams),
        ):
            if number < 1:
                raise ConfigError(f"`{what}` is `{number}`, it must be at least 1")
        if self.geometry.layers > _MAX_LAYERS:
            raise ConfigError(f"`{self.geometry.layers}` layers are more than `{_MAX_LAYERS}`")
        if self.pages > _MAX_PAGES:
            raise ConfigError(
                f"`{self.pages}` pages are more than `{_MAX_PAGES}`",
                hint="use larger blocks, fewer tokens or a smaller `--total`",
            )
        if not 1.0 <= self.slots_factor <= 64.0:
            raise ConfigError(f"`slots_factor` is `{self.slots_factor}`, it must be between 1 and 64")

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer: the `block_bytes` of a row."""
        return self.geometry.page_bytes(self.block_tokens)

    @property
    def pages(self) -> int:
        """Pages moved by one iteration: the `num_blocks` of a row."""
        return self.geometry.layers * self.blocks * self.requests

    @property
    def total_bytes(self) -> int:
        """Bytes moved by one iteration."""
        return self.pages * self.page_bytes

    @property
    def pool_blocks(self) -> int:
        """Blocks in the pool of each side."""
        return pool_blocks(self.blocks * self.requests, self.slots_factor, self.fragmentation)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool of each side."""
        return self.pool_blocks * self.geometry.layers * self.page_bytes

    @property
    def where(self) -> str:
        """Who allocates the pages, `auto` resolved: what the transport is made for."""
        if self.memory != "auto":
            return self.memory
        if self.transport == "cuda":
            return "cuda"
        return "pool" if self.transport in ("auto", "shm") else "private"

    @property
    def required(self) -> str | None:
        """The transport to require, or none."""
        return None if self.transport == "auto" else self.transport

    @property
    def active(self) -> str:
        """The role that starts transfers: the reader or the writer."""
        return "consumer" if self.op in ("pull", "read") else "producer"

    def tables(self, end: str) -> list[Ids]:
        """Draws the block tables of one end (`src` or `dst`), one per request."""
        return block_tables(self.seed, end, self.requests, self.blocks, self.pool_blocks, self.fragmentation)

    def label(self) -> str:
        """A few words for a progress bar."""
        return f"{self.op} {self.transport} {self.geometry.name} {self.page_bytes} B x {self.pages}"

    def to_json(self) -> dict[str, object]:
        """Gives plain values for the control channel."""
        return {**asdict(self), "fragmentation": str(self.fragmentation)}

    @classmethod
    def from_json(cls, value: object) -> Case:
        """Reads `to_json` back; everything is checked, since it comes from another process.

        Raises:
            ConfigError: A field is missing, unknown, or of the wrong kind.
        """
        plain = fields_of(value, cls)
        geometry = fields_of(plain["geometry"], Geometry)
        ucx = fields_of(plain["ucx"], Ucx)
        fragmentation = Fragmentation.parse(str(plain["fragmentation"]))
        made = {"geometry": Geometry(**geometry), "ucx": Ucx(**ucx), "fragmentation": fragmentation}  # type: ignore[arg-type]
        return cls(**{**plain, **made})  # type: ignore[arg-type]


_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "float": (float, int)}


def fields_of(value: object, cls: type[Any]) -> dict[str, object]:
    """Checks that a value of another process has the fields of a dataclass, and numbers and texts where it has them.

    Raises:
        ConfigError: A field is missing, unknown, or of the wrong kind.
    """
    names = {one.name: str(one.type) for one in fields(cls)}
    if not isinstance(value, dict) or set(value) != set(names):
        raise ConfigError(f"a {cls.__name__.lower()} needs exactly the fields {', '.join(names)}")
    for name, kind in names.items():
        if kind in _KINDS and (isinstance(value[name], bool) or not isinstance(value[name], _KINDS[kind])):
            raise ConfigError(f"`{name}` is `{value[name]!r}`, it must be of type {kind}")
    return value


@dataclass(frozen=True, slots=True)
class Axes:
    """The values asked for on each axis; the cases are their product."""

    ops: tuple[str, ...]
    transports: tuple[str, ...]
    geometries: tuple[Geometry, ...]
    block_tokens: tuple[int, ...]
    isl: tuple[int, ...]
    bursts: tuple[int, ...]
    threads: tuple[int, ...]
    streams: int
    fragmentation: Fragmentation
    layout: str
    memory: str
    slots_factor: float
    seed: int
    total: int | None = None
    ucx: Ucx = field(default_factory=Ucx)

    def cases(self) -> Iterator[Case]:
        """Gives every combination, the slowest axis first.

        With `total` set the geometries are raw blocks, and a request is that many bytes of them.

        Raises:
            ConfigError: A combination is impossible.
        """
        for transport, op, geometry, tokens, isl, burst, threads in itertools.product(
            self.transports, self.ops, self.geometries, self.block_tokens, self.isl, self.bursts, self.threads
        ):
            if self.total is None:
                blocks = -(-isl // tokens)
            else:
                blocks = self.total // burst // geometry.page_bytes(tokens)
                if blocks == 0:
                    raise ConfigError(f"`--total {self.total}` holds no block of `{geometry.page_bytes(tokens)}` bytes")
            yield Case(
                geometry=geometry,
                op=op,
                transport=transport,
                block_tokens=tokens,
                blocks=blocks,
                requests=burst,
                threads=threads,
                streams=self.streams,
                fragmentation=self.fragmentation,
                layout=self.layout,
                memory=self.memory,
                slots_factor=self.slots_factor,
                seed=self.seed,
                ucx=self.ucx,
            )
