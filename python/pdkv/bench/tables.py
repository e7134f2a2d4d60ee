"""Seeded block tables: which pool blocks a request owns, scattered as asked. Knows only numpy."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdkv.errors import ConfigError

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How scattered block ids are.

    Attributes:
        run: Consecutive ids before a jump; 0 means one single run.
    """

    run: int

    @classmethod
    def parse(cls, text: str) -> Fragmentation:
        """Reads `random`, `runs:N` or `none`.

        Raises:
            ConfigError: It is none of these.
        """
        if text == "random":
            return cls(1)
        if text == "none":
            return cls(0)
        kind, _, number = text.partition(":")
        if kind == "runs" and number.isascii() and number.isdigit() and int(number) > 0:
            return cls(int(number))
        raise ConfigError(
            f"`{text}` is not a fragmentation", hint="use `random`, `none` or `runs:N`, for example `runs:16`"
        )

    def __str__(self) -> str:
        return {0: "none", 1: "random"}.get(self.run, f"runs:{self.run}")


def pool_blocks(count: int, slots_factor: float, fragmentation: Fragmentation) -> int:
    """Says how many blocks a pool needs so that `count` of them can be scattered, in whole runs."""
    run = max(1, fragmentation.run)
    return max(-(-count // run), int(count * slots_factor) // run) * run


def block_tables(seed: int, end: str, requests: int, blocks: int, pool: int, fragmentation: Fragmentation) -> list[Ids]:
    """Draws one table of `blocks` distinct ids per request; tables of one end share no id.

    Args:
        seed: The run's seed; the same seed gives the same tables everywhere.
        end: `src` or `dst`; the two ends draw independently.
        requests: How many tables.
        blocks: Ids per table.
        pool: Ids are below this.
        fragmentation: How scattered they are.

    Raises:
        ConfigError: The pool is too small.
    """
    count = requests * blocks
    run = fragmentation.run or count
    if pool < -(-count // run) * run:
        raise ConfigError(f"a pool of `{pool}` blocks cannot hold `{count}` blocks in runs of `{run}`")
    rng = np.random.default_rng([seed, zlib.crc32(end.encode())])
    starts = rng.permutation(pool // run)[: -(-count // run)].astype(np.int64) * run
    ids = (starts[:, None] + np.arange(run, dtype=np.int64)[None, :]).reshape(-1)[:count]
    return [np.ascontiguousarray(ids[i * blocks : (i + 1) * blocks]) for i in range(requests)]
