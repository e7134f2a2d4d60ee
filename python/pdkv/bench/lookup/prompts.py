"""The prompts in a lookup buffer: drawn from a seed, alike in both processes, the first half of each the same for all.

A common half is what a system prompt makes of real traffic, and the worst there is for an index: what tells the entries
apart comes late.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.bench.cases import fields_of
from pdkv.bench.pipe.exchange import LIBRARIES
from pdkv.errors import ConfigError

_VOCABULARY = 128_256  # of `llama-3.1-8b`
_MAX_ENTRIES, _MAX_TOKENS, _MAX_ALL = 1 << 24, 1 << 24, 1 << 32

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompts:
    """How many, how long, and what they are made with.

    Attributes:
        entries: Prompts in the buffer.
        tokens: Of each of them.
        library: `torch` for tensors, `numpy` for arrays.
        seed: Draws them.
    """

    entries: int
    tokens: int
    library: str
    seed: int

    def __post_init__(self) -> None:
        if self.library not in LIBRARIES:
            raise ConfigError(f"`{self.library}` is no library", hint=f"use {', '.join(LIBRARIES)}")
        if not 4 <= self.entries <= _MAX_ENTRIES or not 4 <= self.tokens <= _MAX_TOKENS or self.all_tokens > _MAX_ALL:
            raise ConfigError(
                f"`{self.entries}` entries of `{self.tokens}` tokens",
                hint="use 4 or more of each, and not absurdly many",
            )

    @property
    def all_tokens(self) -> int:
        """Tokens in all of them."""
        return self.entries * self.tokens

    def label(self, position: str) -> str:
        """Says what is looked up."""
        return f"{position} of {self.entries:,} x {self.tokens:,} tokens"

    def draw(self) -> list[Any]:
        """Gives the tokens of every prompt, [tokens] of int64 each."""
        common = self.tokens // 2
        rows: npt.NDArray[np.int64] = np.empty((self.entries, self.tokens), dtype=np.int64)
        rows[:, :common] = np.random.default_rng(self.seed).integers(0, _VOCABULARY, common)
        rows[:, common:] = np.random.default_rng([self.seed, 1]).integers(
            0, _VOCABULARY, (self.entries, self.tokens - common)
        )
        # Prompts differ whatever was drawn.
        rows[:, common] = np.arange(self.entries)
        if self.library == "numpy":
            return list(rows)
        return list(importlib.import_module("torch").from_numpy(rows).unbind(0))

    def payload(self, number: int) -> Any:
        """Gives what stands for the KV of an entry: [8] of its number, so that another's would be noticed."""
        values = np.full(8, number, dtype=np.int64)
        return values if self.library == "numpy" else importlib.import_module("torch").from_numpy(values)

    def mask(self) -> Any:
        """Gives the mask of any of them: every token counts."""
        everything = np.ones(self.tokens, dtype=bool)
        return everything if self.library == "numpy" else importlib.import_module("torch").from_numpy(everything)

    def to_json(self) -> dict[str, object]:
        """Gives plain values for the control channel."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Prompts:
        """Reads `to_json` back.

        Raises:
            ConfigError: A field is missing, unknown, or of the wrong kind.
        """
        return cls(**fields_of(value, cls))  # type: ignore[arg-type]
